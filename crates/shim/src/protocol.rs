//! What merger and shim tell each other: structs of integers of this machine, through a socket.

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages of the longest run. Whoever touches one waits until all are done.
pub const RUN_PAGES_MAX: usize = 256;
/// Runs of the longest request.
pub const RUNS_MAX: usize = 4096;
/// A pool's number that stands for zeros.
pub const ZEROS: u32 = u32::MAX;
/// Variable with the number of a listening socket.
pub const SOCKET: &str = "COFOLIO_SHIM_SOCKET";
/// Variable with the bytes of the guest's memory.
pub const MEMORY: &str = "COFOLIO_SHIM_MEMORY";

/// What is asked for ([`Head::kind`]).
pub mod kind {
    /// Says where the guest's memory is; the answer is a [`super::Hello`].
    pub const HELLO: u32 = 1;
    /// Keeps a pool: `argument` is its number, `count` its pages; a descriptor comes with it. The
    /// answer is an errno.
    pub const POOL: u32 = 2;
    /// Gives up a pool's descriptor; its pages stay where they are mapped. The answer is an errno.
    pub const FORGET: u32 = 3;
    /// Merges `count` [`super::Run`]s, which follow. The answer is as many [`super::Outcome`]s.
    pub const MERGE: u32 = 4;
    /// Makes `count` [`super::Run`]s of broken pool pages anonymous again. The answer is as many
    /// [`super::Outcome`]s.
    pub const CONVERT: u32 = 5;
    /// Says which pools are kept. The answer is a count, and for each a [`super::Head`] as for
    /// [`POOL`], with the descriptor.
    pub const POOLS: u32 = 6;
}

/// The beginning of a request.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Head {
    /// What is asked for: one of [`kind`].
    pub kind: u32,
    /// How many of what follows.
    pub count: u32,
    /// A pool's number.
    pub argument: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where the guest's memory is.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Hello {
    /// Address in the VMM's process.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Why pages cannot be merged, or 0.
    pub errno: u32,
    /// Zero.
    pub reserved: u32,
}

/// Pages of the guest's memory, one after the other, and of a pool.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Run {
    /// Number of the first page in the guest's memory.
    pub page: u64,
    /// The pool, or [`ZEROS`].
    pub pool: u32,
    /// Number of the first page in the pool.
    pub pool_page: u32,
    /// How many, at most [`RUN_PAGES_MAX`].
    pub pages: u32,
    /// Zero.
    pub reserved: u32,
}

/// What came of a run.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// A bit for each page that was merged, the lowest first.
    pub merged: [u64; RUN_PAGES_MAX / 64],
    /// Pages that had another content.
    pub changed: u16,
    /// Pages that could not be moved: pinned, shared with a child, or not there.
    pub busy: u16,
    /// Why pages could not be mapped, or 0: they were moved back.
    pub errno: u32,
}

const _: () = {
    assert!(size_of::<Head>() == 16);
    assert!(size_of::<Hello>() == 24);
    assert!(size_of::<Run>() == 24);
    assert!(size_of::<Outcome>() == 40);
};

impl Outcome {
    /// How many pages were merged.
    pub fn count(&self) -> u32 {
        self.merged.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether this page of the run was merged.
    pub fn is_merged(&self, page: usize) -> bool {
        self.merged.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 != 0)
    }
}

/// A struct of integers without padding.
///
/// # Safety
/// Any bytes are a value of the type, and it has no bytes that are not a field's.
pub unsafe trait Plain: Copy + Default {
    /// Its bytes.
    fn bytes(values: &[Self]) -> &[u8] {
        // SAFETY: the type has no padding, so all of its bytes are initialised.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }

    /// Its bytes, to be filled.
    fn bytes_mut(values: &mut [Self]) -> &mut [u8] {
        // SAFETY: as above, and any bytes are a value.
        unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
    }
}

// SAFETY: each is a struct of integers in the order of their sizes, and the sizes above leave no room
// for padding.
unsafe impl Plain for Head {}
// SAFETY: as above.
unsafe impl Plain for Hello {}
// SAFETY: as above.
unsafe impl Plain for Run {}
// SAFETY: as above.
unsafe impl Plain for Outcome {}
// SAFETY: an integer.
unsafe impl Plain for u32 {}
