//! Messages of merger and shim: structs of integers of this machine, through a socket.

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages of the longest run. A thread that touches one of them waits until all are merged.
pub const RUN_PAGES_MAX: usize = 256;
/// Runs of the longest request.
pub const RUNS_MAX: usize = 4096;
/// The number in place of a pool's that means zeros.
pub const ZEROS: u32 = u32::MAX;
/// Variable with the number of a listening socket.
pub const SOCKET: &str = "COFOLIO_SHIM_SOCKET";
/// Variable with the number of a descriptor of `/dev/userfaultfd`.
pub const USERFAULTFD: &str = "COFOLIO_SHIM_USERFAULTFD";
/// Variable with the bytes of the guest's memory.
pub const MEMORY: &str = "COFOLIO_SHIM_MEMORY";

/// Kinds of requests ([`Head::kind`]).
pub mod kind {
    /// Asks for the address of the guest's memory; the answer is a [`super::Hello`].
    pub const HELLO: u32 = 1;
    /// Keeps a pool: `argument` is its number, `count` its pages; a descriptor comes with it. The
    /// answer is an errno.
    pub const POOL: u32 = 2;
    /// Gives up a pool's descriptor; mappings of the pool stay. The answer is an errno.
    pub const FORGET: u32 = 3;
    /// Merges `count` [`super::Run`]s, which follow. The answer is as many [`super::Outcome`]s.
    pub const MERGE: u32 = 4;
    /// Makes `count` [`super::Run`]s of merged pages anonymous memory again. The answer is as many
    /// [`super::Outcome`]s.
    pub const CONVERT: u32 = 5;
    /// Asks for all pools. The answer is their number, and for each a [`super::Head`] as for
    /// [`POOL`], with the descriptor.
    pub const POOLS: u32 = 6;
}

/// The beginning of a request.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Head {
    /// One of [`kind`].
    pub kind: u32,
    /// Number of the structs that follow.
    pub count: u32,
    /// A pool's number.
    pub argument: u32,
    /// Zero.
    pub reserved: u32,
}

/// Address of the guest's memory.
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

/// Consecutive pages of the guest's memory, and as many of a pool.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Run {
    /// Number of the first page in the guest's memory.
    pub page: u64,
    /// The pool, or [`ZEROS`].
    pub pool: u32,
    /// Number of the first page in the pool.
    pub pool_page: u32,
    /// Number of pages, at most [`RUN_PAGES_MAX`].
    pub pages: u32,
    /// Zero.
    pub reserved: u32,
}

/// Outcome of a run.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// A bit for each page that was merged, the lowest first.
    pub merged: [u64; RUN_PAGES_MAX / 64],
    /// Pages that had another content.
    pub changed: u16,
    /// Pages that could not be moved: pinned, shared with a child, or absent.
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
    /// Number of merged pages.
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

// SAFETY: each is a struct of integers in the order of their sizes. Their sizes, asserted above,
// leave no room for padding.
unsafe impl Plain for Head {}
// SAFETY: as above.
unsafe impl Plain for Hello {}
// SAFETY: as above.
unsafe impl Plain for Run {}
// SAFETY: as above.
unsafe impl Plain for Outcome {}
// SAFETY: an integer.
unsafe impl Plain for u32 {}
