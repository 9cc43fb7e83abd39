//! What usage lists take with the chunks and the shards that are shipped. The unit tests have
//! smaller chunks.

use cofolio_node::ledger::usage::{CgroupId, ObjectId, SuperblockId, UsageLists};

/// As many as those of the ledger.
const SHARDS: usize = 16;

fn touch(lists: &UsageLists, pair: u32, object: u32) {
    lists.touch(SuperblockId(pair % 997), CgroupId(pair), ObjectId(object), 0);
}

/// A cap of memory is worth what is known of the memory of an entry.
#[test]
fn lists_take_no_more_than_their_count_says() {
    for lists_of in [1, 100] {
        let lists = UsageLists::new(SHARDS);
        for entry in 0..100_000 {
            touch(&lists, entry / lists_of, entry % lists_of);
            let (bytes, bytes_max) = (lists.memory_bytes(), lists.count().bytes_max());
            assert!(
                bytes as u64 <= bytes_max + (SHARDS << 10) as u64,
                "{entry}: {bytes}, {bytes_max}"
            );
        }
    }
}

/// The size of a table doubles at once, so its promise is checked at many sizes.
#[test]
fn a_pair_with_four_objects_takes_at_most_256_bytes() {
    let lists = UsageLists::new(SHARDS);
    for pair in 0..100_000 {
        (0..4).for_each(|object| touch(&lists, pair, object));
        let bytes = lists.memory_bytes() / (pair as usize + 1);
        assert!(pair < 100 || bytes <= 256, "{bytes} bytes per pair at {pair} pairs");
    }
}
