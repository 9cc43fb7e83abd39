// Tests of several crates include this file. It asserts that work grows linearly with its input. It
// measures the processor time of this thread, which a busy machine does not lengthen, and compares
// two sizes, so that a slow machine does not fail.

/// Runs `work` with `count` / 8 and with `count`. Panics if the second takes more than 24 times as
/// long: 8 times is linear, 64 times is quadratic. A virtual machine that is held up counts that as
/// processor time (once 63 ms after 2.6 ms), so all of three tries have to say so.
pub(crate) fn assert_linear(count: usize, mut work: impl FnMut(usize)) {
    let mut measure = |count: usize| {
        let before = on_processor();
        work(count);
        on_processor() - before
    };
    // The first run also pays for what is set up once, such as memory from the kernel.
    measure(count / 8);
    let tried = [(); 3].map(|()| (measure(count / 8), measure(count)));
    let is_linear = tried.iter().any(|(few, many)| *many < *few * 24);
    assert!(is_linear, "{tried:?} for {} and {count}", count / 8);
}

/// Processor time of this thread so far.
fn on_processor() -> std::time::Duration {
    // The kernel brings the figure up to date when the thread gives way, and otherwise at each tick.
    std::thread::yield_now();
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("readable");
    let nanos = stat.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("a number");
    std::time::Duration::from_nanos(nanos)
}
