//! Networks that fail in the middle.

use std::io::Write as _;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cofolio_image::error::ImportError;
use cofolio_image::import::{ImportOptions, import};
use cofolio_image::registry::RegistryOptions;
use cofolio_store::FileKind;
use cofolio_store::task::{Cancel, Task};

use crate::server::{Answer, Cutter, Fake, Hello};
use crate::support::{Bench, sha256};
use crate::{app, layer, options, pull, source};

/// Every connection ends after 100 KiB, whether in the middle of a blob or not; a pull of 1.5 MiB
/// comes through, and no byte that was hashed is fetched twice.
#[test]
fn a_download_goes_on_where_the_connection_was_cut() {
    let fake = Fake::honest();
    let layers = [layer(1, 700_000), layer(2, 800_000)];
    fake.tag("1", &fake.image(&layers));
    let cutter = Cutter::new(fake.address, 100 << 10);
    let report = pull(&Bench::new(), &app(cutter.address), options()).unwrap();
    assert!(cutter.connections.load(Ordering::Relaxed) >= 14);
    let whole = pull(&Bench::new(), &app(fake.address), options()).unwrap();
    assert_eq!(report.image, whole.image);
    let ranges: Vec<u64> = fake
        .log()
        .iter()
        .filter(|asked| asked.path.ends_with(&sha256(&layers[1].bytes)))
        .filter_map(|asked| {
            asked.header("range").strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
        })
        .collect();
    assert!(ranges.len() >= 7, "{ranges:?}");
    assert!(ranges.is_sorted() && ranges[0] > 90_000, "{ranges:?}");
}

/// The same with a server that knows no ranges: what is known is skipped. Each connection gets
/// further than the one before.
#[test]
fn a_server_without_ranges_is_read_from_the_beginning() {
    let layers = [layer(1, 600_000)];
    let tries = AtomicU64::new(0);
    let fake = Fake::new(move |asked, mut answer| {
        if asked.is_blob() && answer.status == 206 || answer.body.len() > 500_000 {
            let count = tries.fetch_add(1, Ordering::Relaxed) + 1;
            let whole = WHOLE.get().unwrap().clone();
            answer = Answer::new(200, whole);
            answer.cut = Some(usize::try_from(count).unwrap() * 150_000);
        }
        answer
    });
    static WHOLE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    WHOLE.set(layers[0].bytes.clone()).unwrap();
    fake.tag("1", &fake.image(&layers));
    let bench = Bench::new();
    let report = pull(&bench, &app(fake.address), options()).unwrap();
    assert!(bench.view(&report).has("/dir/noise1"));
    assert!(fake.asked().len() >= 6, "{:?}", fake.asked());
}

/// A connection that stands still counts as cut after the stall timeout.
#[test]
fn a_stalled_download_is_taken_up_again() {
    let stalled = AtomicU64::new(0);
    let fake = Fake::new(move |asked, mut answer| {
        if asked.is_blob()
            && answer.body.len() > 100_000
            && stalled.fetch_add(1, Ordering::Relaxed) < 2
        {
            answer.stall = Some(80_000);
        }
        answer
    });
    fake.tag("1", &fake.image(&[layer(1, 400_000)]));
    let options = RegistryOptions { stall_timeout: Duration::from_millis(300), ..options() };
    pull(&Bench::new(), &app(fake.address), options).unwrap();
    let layer = format!("GET blobs/{}", sha256(&layer(1, 400_000).bytes));
    assert!(fake.asked().iter().filter(|asked| **asked == layer).count() >= 3);
}

/// A cancelled pull waited for a registry that says nothing more until the stall timeout, 30 s by
/// default. Here the timeout never comes: the registry stalls in the middle of a blob, or before it
/// answers at all.
#[test]
fn a_cancelled_pull_does_not_wait_for_the_network() {
    for in_the_middle in [true, false] {
        let cancel = Cancel::default();
        let cancels = cancel.clone();
        let fake = Fake::new(move |asked, mut answer| {
            if asked.is_blob() && answer.body.len() > 100_000 {
                cancels.cancel();
                answer.stall = Some(80_000);
                if !in_the_middle {
                    std::thread::sleep(Duration::from_secs(24 * 60 * 60));
                }
            }
            answer
        });
        fake.tag("1", &fake.image(&[layer(1, 400_000)]));
        let stall_timeout = Duration::from_secs(24 * 60 * 60);
        let registry = RegistryOptions { stall_timeout, ..options() };
        let options = ImportOptions { registry, ..ImportOptions::default() };
        let bench = Bench::new();
        let task = Task::new(cancel, |_| ());
        let error = import(&bench.domain, &source(&app(fake.address)), &options, &task);
        assert!(matches!(error, Err(ImportError::Cancelled(_))), "{error:?}");
    }
}

/// A server that answered once and then hung was waited for six stall timeouts, three minutes by
/// default, for each blob. Two timeouts without a byte of any blob end the pull.
#[test]
fn a_server_that_hangs_is_waited_for_once() {
    for header in [true, false] {
        let begun = AtomicU64::new(0);
        let fake = Fake::new(move |asked, mut answer| {
            if asked.is_blob() && answer.body.len() > 100_000 {
                match begun.fetch_add(1, Ordering::Relaxed) {
                    0 => answer.stall = Some(80_000),
                    _ if header => answer.stall = Some(0),
                    _ => std::thread::sleep(Duration::from_secs(24 * 60 * 60)),
                }
            }
            answer
        });
        let layers = [layer(1, 400_000), layer(2, 400_000)];
        fake.tag("1", &fake.image(&layers));
        let stall_timeout = Duration::from_millis(300);
        let options = RegistryOptions { stall_timeout, jobs: 1, ..options() };
        let error = pull(&Bench::new(), &app(fake.address), options).unwrap_err().to_string();
        let named = format!("{}/v2/app/blobs/{}", fake.address, sha256(&layers[0].bytes));
        assert!(error.contains(&named) && error.contains("tried 2 times"), "{header}: {error}");
        let tries = fake.asked().iter().filter(|asked| asked.starts_with("GET blobs/")).count();
        assert_eq!(tries, 3, "one of the config, two of the first layer: {:?}", fake.asked());
    }
}

#[test]
fn overload_is_waited_for_but_not_for_ever() {
    for (status, header) in
        [(429, "0"), (503, "3600"), (500, ""), (502, "Fri, 31 Dec 1999 23:59:59 GMT")]
    {
        let count = Arc::new(AtomicU64::new(0));
        let asked_so_far = count.clone();
        let fake = Fake::new(move |asked, answer| {
            // Twice for everything that is asked.
            match asked_so_far.fetch_add(1, Ordering::Relaxed) % 3 {
                _ if asked.path == "/v2/" => answer,
                2 => answer,
                _ => Answer::error(status, "later").with("Retry-After", header),
            }
        });
        fake.tag("1", &fake.image(&[layer(1, 1000)]));
        pull(&Bench::new(), &app(fake.address), options()).unwrap();
    }
    let busy = Fake::new(|_, _| Answer::error(429, "too many requests"));
    let bench = Bench::new();
    let before = bench.listing();
    let error = pull(&bench, &app(busy.address), options()).unwrap_err().to_string();
    assert!(error.contains("status 429: too many requests (tried 6 times)"), "{error}");
    assert_eq!(bench.listing(), before);
}

#[test]
fn a_registry_that_is_not_there_is_named() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let bench = Bench::new();
    let before = bench.listing();
    let error = pull(&bench, &app(nobody), options()).unwrap_err().to_string();
    assert!(error.contains(&nobody.to_string()) && error.contains("tried 3 times"), "{error}");
    assert_eq!(bench.listing(), before);

    // A name that does not exist will not in a second either. Without a resolver it may.
    let error = pull(&bench, "no-such-host.invalid/app:1", options()).unwrap_err().to_string();
    let unknown = error.ends_with("no host of that name") || error.contains("tried 3 times");
    assert!(unknown, "{error}");
}

/// A status 500 was asked for 12 times, six of them for a HEAD that only saves a GET.
#[test]
fn a_failing_registry_is_asked_for_the_manifest_only() {
    let failing = Fake::new(|_, _| Answer::error(500, "broken"));
    let error = pull(&Bench::new(), &app(failing.address), options()).unwrap_err().to_string();
    assert!(error.contains("status 500: broken (tried 6 times)"), "{error}");
    let asked = failing.asked();
    assert_eq!(asked.iter().filter(|asked| asked.starts_with("HEAD")).count(), 1, "{asked:?}");
    assert_eq!(asked.len(), 7, "{asked:?}");
}

/// A server that takes connections and says nothing, or sends one header line after the other, was
/// tried six times, half a minute each.
#[test]
fn a_silent_registry_is_tried_twice() {
    for lines in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                std::thread::spawn(move || {
                    let mut stream = stream.unwrap();
                    let mut text = "HTTP/1.1 200 OK\r\n";
                    while !lines || stream.write_all(text.as_bytes()).is_ok() {
                        std::thread::sleep(Duration::from_millis(20));
                        text = "X-More: to come\r\n";
                    }
                });
            }
        });
        let options = RegistryOptions {
            connect_timeout: Duration::from_millis(300),
            stall_timeout: Duration::from_millis(300),
            ..options()
        };
        let error = pull(&Bench::new(), &app(address), options).unwrap_err().to_string();
        assert!(error.contains("tried 2 times"), "lines: {lines}: {error}");
    }
}

/// The first layer was complete when the second could not be had: the next pull does not fetch it
/// again.
#[test]
fn complete_layers_outlive_a_pull_that_fails() {
    let layers = [layer(1, 3_000_000), layer(2, 2_000_000)];
    let second = sha256(&layers[1].bytes);
    let broken = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let fails = broken.clone();
    let fake = Fake::new(move |asked, answer| {
        match asked.path.ends_with(&second) && fails.load(Ordering::Relaxed) {
            true => Answer::error(502, "upstream"),
            false => answer,
        }
    });
    fake.tag("1", &fake.image(&layers));
    let bench = Bench::new();
    // One after the other, so that the first is complete.
    let options = RegistryOptions { jobs: 1, ..options() };
    let error = pull(&bench, &app(fake.address), options.clone()).unwrap_err().to_string();
    assert!(error.contains("status 502"), "{error}");
    assert_eq!(bench.domain.refs().unwrap().len(), 0);
    assert_eq!(bench.domain.images().unwrap().len(), 0);
    broken.store(false, Ordering::Relaxed);
    let report = pull(&bench, &app(fake.address), options.clone()).unwrap();
    let known: Vec<bool> = report.layers.iter().map(|layer| layer.known).collect();
    assert_eq!(known, [true, false]);
    let first = format!("GET blobs/{}", sha256(&layers[0].bytes));
    assert_eq!(fake.asked().iter().filter(|asked| **asked == first).count(), 1);
    // The same image as one that came in one go.
    let whole = pull(&Bench::new(), &app(fake.address), options).unwrap();
    assert_eq!(whole.image, report.image);
    assert_eq!(whole.objects_new, 3);
}

/// A limited pull, which would take hours, is still at its first layer after three unlimited pulls
/// of the same image. A unit test of `Limiter` shows that all connections share one limit.
#[test]
fn the_rate_is_limited() {
    let layers = [layer(1, 1_000_000), layer(2, 1000)];
    let second = sha256(&layers[1].bytes);
    let (asked, first_is_asked) = std::sync::mpsc::channel();
    let (others_are_done, done) = std::sync::mpsc::channel::<()>();
    let ends = std::sync::Mutex::new(Some((asked, done)));
    let fake = Fake::new(move |asked, answer| {
        if !asked.path.ends_with(&second) {
            return answer;
        }
        // The first pull alone has to wait for its second layer, and does not get it.
        let ends = ends.lock().unwrap().take();
        match ends {
            None => answer,
            Some((asked, done)) => {
                asked.send(()).unwrap();
                done.recv().unwrap();
                Answer::error(404, "gone")
            }
        }
    });
    fake.tag("1", &fake.image(&layers));
    let bench = Bench::new();
    std::thread::scope(|scope| {
        let slow = RegistryOptions { rate_max: 100, jobs: 2, ..options() };
        let pulled = scope.spawn(|| pull(&bench, &app(fake.address), slow));
        first_is_asked.recv().unwrap();
        for _ in 0..3 {
            pull(&Bench::new(), &app(fake.address), options()).unwrap();
        }
        others_are_done.send(()).unwrap();
        let error = pulled.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("gone"), "{error}");
    });
    assert_eq!(bench.domain.named(FileKind::Layer).unwrap(), []);
}

/// A registry that sent a few bytes a second was read for as long as it liked: 35 bytes a second
/// counted as getting on.
#[test]
fn a_registry_that_is_too_slow_is_given_up() {
    for ranges in [true, false] {
        let layers = [layer(1, 300_000)];
        let whole = layers[0].bytes.clone();
        let fake = Fake::new(move |asked, mut answer| {
            if asked.is_blob() && answer.body.len() > 1000 {
                if !ranges {
                    answer = Answer::new(200, whole.clone());
                }
                answer.drip = Some(64);
            }
            answer
        });
        fake.tag("1", &fake.image(&layers));
        let options = RegistryOptions {
            stall_timeout: Duration::from_millis(100),
            rate_min: 10 << 20,
            tries_max: 2,
            ..options()
        };
        let error = pull(&Bench::new(), &app(fake.address), options).unwrap_err().to_string();
        assert!(error.contains("too slow") && error.contains("tried 2 times"), "{error}");
    }
}

/// A manifest that came byte by byte was given two minutes, six times.
#[test]
fn a_document_that_is_too_slow_is_not_asked_for_again() {
    let fake = Fake::new(move |asked, mut answer| {
        answer.drip = (!asked.is_blob()).then_some(1);
        answer
    });
    fake.tag("1", &fake.image(&[layer(1, 100)]));
    let options = RegistryOptions { stall_timeout: Duration::from_millis(100), ..options() };
    let error = pull(&Bench::new(), &app(fake.address), options).unwrap_err().to_string();
    assert!(error.contains("too slowly") && !error.contains("tried"), "{error}");
}

/// A registry without TLS that waits for a line of text, or hangs up, never says that it has no
/// TLS. It was asked by TLS until the last try.
#[test]
fn a_plain_registry_that_ignores_tls_is_asked_by_http() {
    for hello in [Hello::Refused, Hello::Ignored, Hello::Closed] {
        let fake = Fake::with(|_, answer| answer, hello);
        fake.tag("1", &fake.image(&[layer(1, 5000)]));
        let options = RegistryOptions {
            connect_timeout: Duration::from_millis(300),
            stall_timeout: Duration::from_secs(2),
            tries_max: 1,
            ..options()
        };
        let report = pull(&Bench::new(), &app(fake.address), options);
        assert!(report.is_ok(), "{hello:?}: {report:?}");
    }
}
