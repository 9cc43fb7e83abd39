//! Metrics in the OpenMetrics text format. `docs/API.md` lists them.
//!
//! Their number is bounded: figures of images are given for the [`IMAGES_MAX`] with most resident,
//! those of trust domains for [`DOMAINS_MAX`] and for all others together.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cofolio_node::ksm::KsmReport;
use cofolio_node::ledger::{DomainAccount, ImageAccount, Report};
use cofolio_node::vm::account::{VmAccount, VmReport};
use cofolio_node::vm::recycler::LATENCY_MS;
use hyper::StatusCode;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use crate::published::{Costs, Encoded, Published};
use crate::upkeep::Done;

/// Images with figures of their own.
const IMAGES_MAX: usize = 50;
/// Trust domains with figures of their own.
const DOMAINS_MAX: usize = 50;
/// Virtual machines with figures of their own.
const MACHINES_MAX: usize = 500;

/// Counters of the daemon; all else is read from the last report.
#[derive(Debug)]
pub(crate) struct Metrics {
    requests: Family<[(&'static str, String); 1], Counter>,
    upkeep: Arc<Mutex<Done>>,
}

impl Metrics {
    pub(crate) fn new(upkeep: Arc<Mutex<Done>>) -> Self {
        Self { requests: Family::default(), upkeep }
    }

    pub(crate) fn count_request(&self, status: StatusCode) {
        self.requests.get_or_create(&[("code", status.as_u16().to_string())]).inc();
    }

    pub(crate) fn encode(&self, published: &Published) -> String {
        let mut registry = Registry::with_prefix("cofolio");
        registry.register("http_requests", "Requests answered", self.requests.clone());
        let upkeep = *self.upkeep.lock().unwrap_or_else(PoisonError::into_inner);
        let period = published.period_seconds().try_into().unwrap_or(i64::MAX);
        let (report, costs) = (published.report(), published.costs());
        let (machines, ksm) = (published.machines(), published.ksm());
        let figures = Figures {
            report,
            costs,
            ledger_time: published.ledger_time(),
            upkeep,
            period,
            machines,
            ksm,
        };
        registry.register_collector(Box::new(figures));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

#[derive(Debug)]
struct Figures {
    report: Arc<Encoded>,
    costs: Costs,
    ledger_time: Duration,
    upkeep: Done,
    period: i64,
    machines: Arc<VmReport>,
    ksm: KsmReport,
}

/// Name, help, and the figure of an account.
type Column<T, F> = (&'static str, &'static str, fn(&T) -> F);

const DOMAINS: [Column<DomainAccount, Option<u64>>; 7] = [
    ("resident", "Objects in the page cache", |it| Some(it.resident_bytes)),
    ("commons", "Objects in the page cache that are charged to the commons", |it| it.commons_bytes),
    ("used", "Objects in the page cache that a container uses", |it| Some(it.used_bytes)),
    ("shared", "Objects in the page cache that several containers use", |it| Some(it.shared_bytes)),
    ("saved", "Bytes that the page cache would hold more if images shared nothing", |it| {
        Some(it.saved_bytes)
    }),
    ("metadata", "Metadata images in the page cache", |it| Some(it.metadata_bytes)),
    ("stored", "Size of all objects", |it| Some(it.bytes)),
];

const MACHINES: [Column<VmAccount, u64>; 9] = [
    ("vm_used", "Private pages that a guest's kernel and programs use", |it| it.used_bytes),
    ("vm_cache", "Private pages of files in a guest's cache", |it| it.cache_bytes),
    ("vm_unreturned", "Private pages that a guest has free and the host holds", |it| {
        it.unreturned_bytes
    }),
    ("vm_merged", "Pages of a guest that pools have", |it| it.merged_bytes),
    ("vm_zero", "Pages of zeros of a guest, which the host does not hold", |it| it.zero_bytes),
    ("vm_image", "Pages of its image that a guest has touched", |it| it.image_bytes),
    ("vm_emulator", "Private pages of a guest's VMM", |it| it.emulator_bytes),
    ("vm_proportional", "Private pages, and a part of each page that machines share", |it| {
        it.proportional_bytes
    }),
    ("vm_memory", "Memory that a guest has", |it| it.memory_bytes),
];

const IMAGES: [Column<ImageAccount, u64>; 3] = [
    ("image_resident", "Objects of an image in the page cache", |it| it.resident_bytes),
    ("image_private", "Objects of an image in the page cache that no other image names", |it| {
        it.private_bytes
    }),
    ("image_saved", "The image's part of what is saved", |it| it.saved_bytes),
];

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.accounts(&mut encoder)?;
        self.sizes(&mut encoder)?;
        self.counts(&mut encoder)?;
        self.times(&mut encoder)?;
        self.machines(&mut encoder)?;
        self.ksm(&mut encoder)?;
        self.counters(&mut encoder)
    }
}

impl Figures {
    fn report(&self) -> &Report {
        &self.report.report
    }

    /// Of trust domains and images.
    fn accounts(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let domains = bounded(&self.report().domains);
        for (name, help, figure) in DOMAINS {
            let known = domains.iter().filter_map(|it| Some((it, figure(it)?)));
            let rows = known.map(|(it, figure)| ([("domain", it.domain.as_str())], figure));
            family(encoder, name, help, rows)?;
        }
        let mut largest: Vec<&ImageAccount> = self.report().images.iter().collect();
        largest.sort_by_key(|it| std::cmp::Reverse(it.resident_bytes));
        largest.truncate(IMAGES_MAX);
        for (name, help, figure) in IMAGES {
            let rows = largest.iter().map(|it| {
                let name = it.names.first().map_or("", String::as_str);
                let labels = [
                    ("domain", it.domain.clone()),
                    ("image", it.image.to_string()),
                    ("name", escaped(name)),
                ];
                (labels, figure(it))
            });
            family(encoder, name, help, rows)?;
        }
        Ok(())
    }

    fn sizes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Report { machine, commons, .. } = self.report();
        let commons = commons.unwrap_or_default();
        for (name, help, value) in [
            (
                "page_cache",
                "Page cache of the machine, shared memory included",
                machine.page_cache_bytes,
            ),
            ("shared_memory", "Shared memory and tmpfs", machine.shared_memory_bytes),
            ("usage_lists", "Memory of the usage lists", self.costs.usage_bytes),
            (
                "commons_charged",
                "Page cache that the commons cgroup is charged for, of all stores",
                commons.charged_bytes,
            ),
            (
                "commons_limit",
                "Limit of the commons cgroup; 0 without one",
                commons.limit_bytes.unwrap_or_default(),
            ),
        ] {
            single(encoder, name, help, Some(&Unit::Bytes), &ConstGauge::new(value))?;
        }
        Ok(())
    }

    fn counts(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Report { images, containers, unknown, .. } = self.report();
        for (name, help, value) in [
            ("images", "Images in the ledger", images.len() as u64),
            ("containers", "Cgroups that use an image", containers.len() as u64),
            ("used_pairs", "Pairs of a mount and a cgroup that are used", self.costs.lists),
            ("used_objects", "Objects used, once for each such pair", self.costs.entries),
            ("unknown_processes", "Processes that could not be read", unknown.processes),
            ("unknown_images", "Images that cannot be read", unknown.images),
            ("unknown_objects", "Objects that could not be looked at", unknown.objects),
            ("unknown_mounts", "Mounts whose opened files are not seen", unknown.mounts),
            (
                "gc_consecutive_failures",
                "Failed garbage collections since the last success",
                self.upkeep.gc_failing.into(),
            ),
            (
                "scrub_consecutive_failures",
                "Failed scrubs since the last success",
                self.upkeep.scrub_failing.into(),
            ),
            ("damaged_files", "Damaged files that the last scrub found", self.upkeep.damaged),
        ] {
            single(encoder, name, help, None, &ConstGauge::new(value))?;
        }
        Ok(())
    }

    fn times(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Report { time, residency_age_seconds, processes_age_seconds, .. } = *self.report();
        // The report, if there is one, has their ages when it was made.
        let since = cofolio_store::now() - time.max(self.upkeep.started);
        let now = |age: u32| i64::from(age) + since.max(0);
        for (name, help, value) in [
            ("residency_age", "Age of the oldest figure of residency", now(residency_age_seconds)),
            ("processes_age", "Age of the oldest look at a process", now(processes_age_seconds)),
            ("start_timestamp", "When the daemon started", self.upkeep.started),
            ("period", "From one report to the next", self.period),
            ("gc_completed_timestamp", "Oldest completion of gc over all domains", self.upkeep.gc),
            ("gc_interval", "From one garbage collection to the next", self.upkeep.gc_interval),
            (
                "scrub_completed_timestamp",
                "Oldest completion of a scrub over all domains",
                self.upkeep.scrub,
            ),
        ] {
            single(encoder, name, help, Some(&Unit::Seconds), &ConstGauge::new(value))?;
        }
        Ok(())
    }

    /// Of virtual machines.
    fn machines(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let report = &self.machines;
        let machines = &report.machines[..report.machines.len().min(MACHINES_MAX)];
        for (name, help, figure) in MACHINES {
            let rows = machines.iter().map(|it| ([("machine", it.name.as_str())], figure(it)));
            family(encoder, name, help, rows)?;
        }
        for (name, help, value) in [
            ("vm_pool", "Pools with pages that virtual machines have in common", report.pool_bytes),
            (
                "vm_images_touched",
                "Pages of images that virtual machines have touched, each once",
                report.image_bytes,
            ),
        ] {
            single(encoder, name, help, Some(&Unit::Bytes), &ConstGauge::new(value))?;
        }
        let returned = ConstCounter::new(report.returned_bytes);
        let help = "Free memory of virtual machines that pulses have returned";
        single(encoder, "vm_returned", help, Some(&Unit::Bytes), &returned)?;
        let help = "How long memory that guests have freed waited for its return, for each byte";
        let kind = MetricType::Histogram;
        let name = "vm_return_latency";
        let mut encoder = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), kind)?;
        let latency = &report.latency;
        let bounds = LATENCY_MS.iter().map(|ms| *ms as f64 / 1000.0).chain([f64::MAX]);
        let classes: Vec<_> = bounds.zip(latency.bytes.iter().copied()).collect();
        let all = latency.bytes.iter().sum();
        encoder.encode_histogram::<NoLabelSet>(latency.byte_ms as f64 / 1000.0, all, &classes, None)
    }

    /// Of KSM; zeros while it is not steered.
    fn ksm(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let KsmReport { steered, saved_bytes, cpu } = self.ksm;
        let steered = ConstGauge::new(u64::from(steered));
        single(encoder, "ksm_steered", "1 while the daemon steers KSM", None, &steered)?;
        let saved = ConstGauge::new(saved_bytes);
        let help = "What KSM saves for all programs, less what its bookkeeping takes";
        single(encoder, "ksm_saved", help, Some(&Unit::Bytes), &saved)?;
        let cpu = ConstCounter::new(cpu.as_secs_f64());
        let help = "Processor time that KSM has taken since the daemon steers it";
        single(encoder, "ksm_cpu", help, Some(&Unit::Seconds), &cpu)
    }

    fn counters(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let unknown = &self.report().unknown;
        for (name, help, value) in [
            ("upkeep_failures", "Times that scheduled upkeep failed", self.upkeep.failures),
            (
                "unknown_openers",
                "Opened files of processes whose container is unknown",
                unknown.openers,
            ),
            ("unknown_files", "Opened files that could not be looked at", unknown.files),
            (
                "unknown_overflows",
                "Times that the queue of opened files was full, or the ledger had no time for it",
                unknown.overflows,
            ),
        ] {
            single(encoder, name, help, None, &ConstCounter::new(value))?;
        }
        let reclaimed = ConstCounter::new(self.costs.reclaimed_bytes);
        let help = "Page cache that the daemon has freed by itself";
        single(encoder, "reclaimed", help, Some(&Unit::Bytes), &reclaimed)?;
        let seconds = ConstCounter::new(self.ledger_time.as_secs_f64());
        let help = "Processor time of the ledger's thread";
        single(encoder, "ledger_cpu", help, Some(&Unit::Seconds), &seconds)
    }
}

/// The trust domains with most resident, and what the others add up to, under an empty name, which
/// no domain has.
fn bounded(domains: &[DomainAccount]) -> Vec<DomainAccount> {
    let mut domains = domains.to_vec();
    domains.sort_by_key(|it| std::cmp::Reverse(it.resident_bytes));
    let others = domains.split_off(domains.len().min(DOMAINS_MAX));
    let sum = others.into_iter().reduce(|sum, it| DomainAccount {
        domain: String::new(),
        objects: sum.objects + it.objects,
        bytes: sum.bytes + it.bytes,
        resident_bytes: sum.resident_bytes + it.resident_bytes,
        commons_bytes: sum.commons_bytes.zip(it.commons_bytes).map(|(sum, it)| sum + it),
        used_bytes: sum.used_bytes + it.used_bytes,
        shared_bytes: sum.shared_bytes + it.shared_bytes,
        saved_bytes: sum.saved_bytes + it.saved_bytes,
        metadata_bytes: sum.metadata_bytes + it.metadata_bytes,
    });
    domains.extend(sum.map(|sum| DomainAccount { domain: String::new(), ..sum }));
    domains
}

fn family<L: prometheus_client::encoding::EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: impl Iterator<Item = (L, u64)>,
) -> fmt::Result {
    let metric = ConstGauge::<u64>::new(0);
    let kind = metric.metric_type();
    let mut encoder = encoder.encode_descriptor(name, help, Some(&Unit::Bytes), kind)?;
    for (labels, value) in rows {
        ConstGauge::new(value).encode(encoder.encode_family(&labels)?)?;
    }
    Ok(())
}

/// A foreign text as the value of a label: prometheus-client does not escape these.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn single(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
}

#[cfg(test)]
mod tests {
    use cofolio_node::vm::account::Latency;

    use super::*;

    fn encoded(domains: Vec<DomainAccount>) -> String {
        let report = Report { domains, ..Report::default() };
        Metrics::new(Arc::default()).encode(&Published::of(report))
    }

    fn account(number: u64, commons_bytes: Option<u64>) -> DomainAccount {
        let domain = format!("d{number}");
        DomainAccount { domain, resident_bytes: number, commons_bytes, ..Default::default() }
    }

    /// The API said null where the kernel does not say what is charged to the commons, and the
    /// metric said 0.
    #[test]
    fn what_is_unknown_is_absent() {
        let known = encoded(vec![account(1, Some(7))]);
        assert!(known.contains("\ncofolio_commons_bytes{domain=\"d1\"} 7\n"), "{known}");
        let unknown = encoded(vec![account(1, None)]);
        assert!(!unknown.contains("\ncofolio_commons_bytes"), "{unknown}");
        assert!(unknown.contains("\ncofolio_resident_bytes{domain=\"d1\"} 1\n"), "{unknown}");
    }

    /// An image of somebody else's, with a quote in its name, made all metrics unreadable.
    #[test]
    fn names_of_images_are_escaped() {
        assert_eq!(escaped("a\\b\"} 1\n"), "a\\\\b\\\"} 1\\n");
        let image = ImageAccount {
            domain: "d".to_owned(),
            image: cofolio_store::Digest([1; 32]),
            names: vec!["a\"c".to_owned()],
            objects: 0,
            bytes: 0,
            resident_bytes: 0,
            shared_bytes: 0,
            private_bytes: 0,
            used_bytes: 0,
            commons_bytes: None,
            saved_bytes: 0,
            metadata_bytes: 0,
            containers: 0,
        };
        let report = Report { images: vec![image], ..Report::default() };
        let text = Metrics::new(Arc::default()).encode(&Published::of(report));
        assert!(text.contains("name=\"a\\\"c\"}"), "{text}");
    }

    /// Classes were gauges, which no query of a histogram takes.
    #[test]
    fn latencies_of_guests_are_a_histogram() {
        let mut latency = Latency { byte_ms: 9_500_000, ..Latency::default() };
        latency.bytes = vec![0; LATENCY_MS.len() + 1];
        (latency.bytes[1], latency.bytes[4], latency.bytes[12]) = (4096, 8192, 1);
        let published = Published::of(Report::default());
        published.set_machines(VmReport { latency, ..VmReport::default() });
        let text = Metrics::new(Arc::default()).encode(&published);
        let name = "cofolio_vm_return_latency_seconds";
        for line in [
            format!("# TYPE {name} histogram"),
            format!("{name}_sum 9500.0"),
            format!("{name}_count 12289"),
            format!("{name}_bucket{{le=\"0.5\"}} 0"),
            format!("{name}_bucket{{le=\"1.0\"}} 4096"),
            format!("{name}_bucket{{le=\"3.0\"}} 12288"),
            format!("{name}_bucket{{le=\"60.0\"}} 12288"),
            format!("{name}_bucket{{le=\"+Inf\"}} 12289"),
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}: {text}");
        }
    }

    /// Every trust domain had series of its own, however many there were.
    #[test]
    fn domains_beyond_the_limit_are_added_up() {
        let max = DOMAINS_MAX as u64;
        let text = encoded((1..=max + 3).map(|number| account(number, Some(number))).collect());
        for name in ["resident", "commons"] {
            let series = format!("\ncofolio_{name}_bytes{{domain=");
            assert_eq!(text.matches(&series).count(), DOMAINS_MAX + 1);
            assert!(text.contains(&format!("{series}\"\"}} 6\n")), "{text}");
            assert!(text.contains(&format!("{series}\"d{}\"}} {0}\n", max + 3)), "{text}");
        }
        let text = encoded((1..=max).map(|number| account(number, None)).collect());
        assert_eq!(text.matches("\ncofolio_used_bytes{domain=").count(), DOMAINS_MAX);
    }
}
