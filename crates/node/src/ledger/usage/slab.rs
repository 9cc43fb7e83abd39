//! A slab whose items form rings, linked by index as the kernel's `struct list_head` links by
//! pointer. An index is half a pointer, and safe Rust can follow it.

use std::{
    iter::successors,
    ops::{Index, IndexMut},
};

/// The place of an item in its slab, valid until the item is removed.
pub(super) type Slot = u32;

/// The neighbours of an item in one ring. A lone item is its own neighbour.
#[derive(Debug, Clone, Copy)]
struct Link {
    prev: Slot,
    next: Slot,
}

#[derive(Debug)]
pub(super) struct Node<T, const RINGS: usize> {
    links: [Link; RINGS],
    item: T,
}

/// Slots of a chunk. A slab grows by chunks, and full ones stay where they are: one vector would be
/// copied as it grows, with a part of it unused, and leave holes for the allocator. Tests, whose
/// slabs are small, have small chunks.
const CHUNK: usize = if cfg!(test) { 16 } else { 1024 };

/// Items that are each in `RINGS` rings.
#[derive(Debug)]
pub(super) struct Slab<T, const RINGS: usize> {
    /// All are full, except perhaps the last one.
    chunks: Vec<Vec<Node<T, RINGS>>>,
    /// The first free slot. Free slots are linked by `links[0].next`; the last links to itself.
    free: Option<Slot>,
    used: usize,
}

impl<T, const RINGS: usize> Default for Slab<T, RINGS> {
    fn default() -> Self {
        Slab { chunks: Vec::new(), free: None, used: 0 }
    }
}

impl<T, const RINGS: usize> Slab<T, RINGS> {
    /// The number of items.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// The number of slots, used or free.
    pub(super) fn slots(&self) -> usize {
        self.chunks.last().map_or(0, |last| (self.chunks.len() - 1) * CHUNK + last.len())
    }

    /// The size of its allocations, in bytes.
    pub(super) fn allocated_bytes(&self) -> usize {
        let last = self.chunks.last().map_or(0, Vec::capacity);
        let nodes = self.chunks.len().saturating_sub(1) * CHUNK + last;
        nodes * size_of::<Node<T, RINGS>>()
            + self.chunks.capacity() * size_of::<Vec<Node<T, RINGS>>>()
    }

    /// Adds an item, alone in all its rings. The caller has less than 2^32 items.
    pub(super) fn insert(&mut self, item: T) -> Slot {
        self.used += 1;
        if let Some(slot) = self.free {
            let next = self.next(0, slot);
            self.free = (next != slot).then_some(next);
            *self.node_mut(slot) = Node::alone(slot, item);
            return slot;
        }
        let slot = Slot::try_from(self.slots()).expect("less than 2^32 items");
        let node = Node::alone(slot, item);
        match self.chunks.last_mut().filter(|last| last.len() < CHUNK) {
            Some(last) => {
                if last.len() == last.capacity() {
                    // Doubling, as Vec does by itself, would leave up to half of it unused.
                    last.reserve_exact((last.len() / 4 + 4).min(CHUNK - last.len()));
                }
                last.push(node);
            }
            None => self.chunks.push(vec![node]),
        }
        slot
    }

    /// Removes an item that is alone in all its rings.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.used -= 1;
        self.node_mut(slot).links[0].next = self.free.unwrap_or(slot);
        self.free = Some(slot);
    }

    /// Puts a lone item into a ring, before the item `next`.
    pub(super) fn link(&mut self, ring: usize, slot: Slot, next: Slot) {
        let prev = self.prev(ring, next);
        self.node_mut(slot).links[ring] = Link { prev, next };
        self.node_mut(prev).links[ring].next = slot;
        self.node_mut(next).links[ring].prev = slot;
    }

    /// Takes an item out of a ring and returns the next one, or `None` if it was alone.
    pub(super) fn unlink(&mut self, ring: usize, slot: Slot) -> Option<Slot> {
        let Link { prev, next } = self.node(slot).links[ring];
        self.node_mut(prev).links[ring].next = next;
        self.node_mut(next).links[ring].prev = prev;
        self.node_mut(slot).links[ring] = Link { prev: slot, next: slot };
        (next != slot).then_some(next)
    }

    pub(super) fn prev(&self, ring: usize, slot: Slot) -> Slot {
        self.node(slot).links[ring].prev
    }

    pub(super) fn next(&self, ring: usize, slot: Slot) -> Slot {
        self.node(slot).links[ring].next
    }

    fn node(&self, slot: Slot) -> &Node<T, RINGS> {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn node_mut(&mut self, slot: Slot) -> &mut Node<T, RINGS> {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    /// Goes around a ring once, starting with `first`.
    pub(super) fn ring(&self, ring: usize, first: Slot) -> impl Iterator<Item = Slot> {
        successors(Some(first), move |&slot| {
            Some(self.next(ring, slot)).filter(|&next| next != first)
        })
    }

    /// Goes around a ring once in the other direction, ending with `first`.
    pub(super) fn ring_back(&self, ring: usize, first: Slot) -> impl Iterator<Item = Slot> {
        successors(Some(self.prev(ring, first)), move |&slot| {
            (slot != first).then(|| self.prev(ring, slot))
        })
    }
}

impl<T, const RINGS: usize> Node<T, RINGS> {
    fn alone(slot: Slot, item: T) -> Self {
        Node { links: [Link { prev: slot, next: slot }; RINGS], item }
    }
}

impl<T, const RINGS: usize> Index<Slot> for Slab<T, RINGS> {
    type Output = T;

    fn index(&self, slot: Slot) -> &T {
        &self.node(slot).item
    }
}

impl<T, const RINGS: usize> IndexMut<Slot> for Slab<T, RINGS> {
    fn index_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.node_mut(slot).item
    }
}

#[cfg(test)]
impl<T, const RINGS: usize> Slab<T, RINGS> {
    /// Walks a ring in both directions and returns its length.
    pub(super) fn check_ring(&self, ring: usize, first: Slot) -> usize {
        let forth: Vec<_> = self.ring(ring, first).take(self.used + 1).collect();
        let back: Vec<_> = self.ring_back(ring, first).take(self.used + 1).collect();
        assert!(forth.iter().eq(back.iter().rev()), "the links of a ring disagree");
        forth.len()
    }

    /// Walks the chain of free slots.
    pub(super) fn check_free(&self) {
        let free =
            successors(self.free, |&slot| Some(self.next(0, slot)).filter(|&next| next != slot));
        assert_eq!(free.take(self.slots() + 1).count(), self.slots() - self.used);
    }
}
