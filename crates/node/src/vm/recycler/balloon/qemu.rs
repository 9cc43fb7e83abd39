//! The balloon of a QEMU.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::{Balloon, Description, GuestMemory, NO_DEFLATE, no_balloon, number};
use crate::vm::qmp::Qmp;

/// Its balloon is one of several kinds.
const BALLOON_TYPE: &str = "child<virtio-balloon";

/// That of a QEMU.
#[derive(Debug)]
pub(super) struct QemuBalloon {
    qmp: Qmp,
    /// Where QEMU has the device.
    path: String,
}

impl QemuBalloon {
    pub(super) fn new(socket: UnixStream) -> io::Result<Self> {
        let mut qmp = Qmp::new(socket)?;
        let path = find(&mut qmp)?.ok_or_else(no_balloon)?;
        Ok(Self { qmp, path })
    }

    fn property(&mut self, name: &str) -> io::Result<Value> {
        self.qmp.call("qom-get", json!({"path": self.path, "property": name}))
    }
}

/// The path of a balloon among the devices that have a name, and those that have none.
fn find(qmp: &mut Qmp) -> io::Result<Option<String>> {
    for parent in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let devices = qmp.call("qom-list", json!({"path": parent}))?;
        let is_balloon = |device: &&Value| {
            device["type"].as_str().is_some_and(|kind| kind.starts_with(BALLOON_TYPE))
        };
        let found = devices.as_array().into_iter().flatten().find(is_balloon);
        if let Some(name) = found.and_then(|device| device["name"].as_str()) {
            return Ok(Some(format!("{parent}/{name}")));
        }
    }
    Ok(None)
}

impl Balloon for QemuBalloon {
    fn describe(&mut self) -> io::Result<Description> {
        let name = self.qmp.call("query-name", json!({}))?;
        let memory = self.qmp.call("query-memory-size-summary", json!({}))?;
        let plugged = memory["plugged-memory"].as_u64().unwrap_or(0);
        let cpus = self.qmp.call("query-cpus-fast", json!({}))?;
        let cpus = cpus.as_array().cloned().unwrap_or_default();
        let thread = cpus.first().and_then(|cpu| cpu["thread-id"].as_u64());
        let thread = thread.and_then(|thread| u32::try_from(thread).ok());
        let statistics = self.property("guest-stats-polling-interval")?;
        Ok(Description {
            name: name["name"].as_str().map(str::to_owned),
            memory_bytes: number(&memory, "base-memory")? + plugged,
            cpus: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
            // Who starts a QEMU may have made the socket for it.
            tasks: self.qmp.peer().into_iter().chain(thread).collect(),
            statistics_seconds: statistics.as_u64().unwrap_or(0),
        })
    }

    fn ask_every(&mut self, seconds: u64) -> io::Result<()> {
        let property = "guest-stats-polling-interval";
        let set = json!({"path": self.path, "property": property, "value": seconds});
        self.qmp.call("qom-set", set).map(drop)
    }

    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        Ok(guest_memory(&self.property("guest-stats")?, SystemTime::now()))
    }

    fn actual(&mut self) -> io::Result<u64> {
        let said = self.qmp.call("query-balloon", json!({}))?;
        said["actual"].as_u64().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn set(&mut self, bytes: u64) -> io::Result<()> {
        self.qmp.call("balloon", json!({ "value": bytes })).map(drop)
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        if self.property("deflate-on-oom")? != true {
            return Ok(Some(NO_DEFLATE.to_owned()));
        }
        let path = format!("{}/virtio-backend", self.path);
        let refusal = match self.qmp.call("x-query-virtio-status", json!({ "path": path })) {
            Ok(status) => refusal_of_features(&status),
            // A QEMU before 7.2 does not know the question.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => None,
            Err(error) => return Err(error),
        };
        Ok(refusal.or(refusal_of_migration(&self.qmp.call("query-migrate", json!({}))?)))
    }
}

/// What the property `guest-stats` says at this moment; none if the guest has said nothing yet.
fn guest_memory(said: &Value, now: SystemTime) -> Option<GuestMemory> {
    let seconds = said["last-update"].as_u64().filter(|seconds| *seconds > 0)?;
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.min(u32::MAX.into()));
    // QEMU shows a missing figure as -1, unsigned.
    let figure = |name: &str| said["stats"][name].as_u64().filter(|it| *it < u64::MAX);
    // QEMU 7.2 knows only the first of these.
    let stalls = ["stat-swap-in", "stat-alloc-stalls", "stat-oom-kills"];
    let stalls = stalls.iter().filter_map(|name| figure(name));
    Some(GuestMemory {
        // It is in whole seconds.
        age: now.duration_since(at).unwrap_or_default(),
        free: figure("stat-free-memory")?,
        caches: figure("stat-disk-caches").unwrap_or(0),
        stalls: stalls.fold(0, u64::saturating_add),
    })
}

/// What the features that the guest's driver has taken say against a pulse. Before it has begun, it
/// has taken none, and says nothing of its memory either.
fn refusal_of_features(status: &Value) -> Option<String> {
    let features = status["guest-features"]["dev-features"].as_array()?;
    // Linux takes it for page poisoning, and for init_on_free.
    let poisons = features.iter().filter_map(Value::as_str).any(|it| it.contains("F_PAGE_POISON"));
    let why = "the guest writes to pages as it frees them (page poisoning or init_on_free)";
    poisons.then(|| why.to_owned())
}

/// QEMU discards nothing while it is the target of a postcopy migration, runs a background
/// snapshot, or replicates itself (COLO). It says which of these goes on only as a migration.
fn refusal_of_migration(migration: &Value) -> Option<String> {
    let status = migration["status"].as_str()?;
    let is_over = ["none", "completed", "cancelled", "failed"].contains(&status);
    (!is_over).then(|| format!("the machine is being migrated or saved ({status})"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    /// As a QEMU 7.2 with a Debian guest (Linux 7.2) said it.
    const FEATURES: [&str; 3] = [
        "VIRTIO_BALLOON_F_REPORTING: Page reporting VQ enabled",
        "VIRTIO_BALLOON_F_DEFLATE_ON_OOM: Deflate balloon when guest OOM",
        "VIRTIO_BALLOON_F_STATS_VQ: Guest memory stats VQ available",
    ];

    fn refused(features: &[&str]) -> Option<String> {
        let features =
            json!({"unknown-dev-features": 1_099_511_627_776_u64, "dev-features": features});
        let host =
            json!({"dev-features": ["VIRTIO_BALLOON_F_PAGE_POISON: Guest page poisoning enabled"]});
        refusal_of_features(&json!({"guest-features": features, "host-features": host}))
    }

    #[test]
    fn features_that_a_guest_has_taken_speak_against_a_pulse() {
        assert_eq!(refused(&FEATURES), None);
        // The same guest with init_on_free=1.
        let poison = "VIRTIO_BALLOON_F_PAGE_POISON: Guest page poisoning enabled";
        let poisons = refused(&[&FEATURES[..], &[poison]].concat()).unwrap();
        assert!(poisons.contains("init_on_free"), "{poisons}");
        // Its driver has not begun, or QEMU does not know the question.
        assert_eq!(refused(&[]), None);
        assert_eq!(refusal_of_features(&json!({})), None);
    }

    #[test]
    fn a_migration_or_snapshot_speaks_against_a_pulse() {
        let refused = |status: &str| refusal_of_migration(&json!({ "status": status }));
        for status in ["active", "postcopy-active", "colo", "setup"] {
            assert!(refused(status).unwrap().contains(status));
        }
        for status in ["none", "completed", "cancelled", "failed"] {
            assert_eq!(refused(status), None);
        }
        // What a QEMU says that has never migrated.
        assert_eq!(refusal_of_migration(&json!({})), None);
    }

    #[test]
    fn what_a_guest_says_has_an_age() {
        let said = json!({"last-update": 1_796_030_205, "stats": {
            "stat-htlb-pgalloc": 0, "stat-swap-out": 0, "stat-available-memory": 116_146_176,
            "stat-htlb-pgfail": 0, "stat-free-memory": 118_530_048, "stat-minor-faults": 196,
            "stat-major-faults": 0, "stat-total-memory": 151_506_944, "stat-swap-in": 3,
            "stat-disk-caches": 1_511_424,
        }});
        let at = |millis: u64| {
            SystemTime::UNIX_EPOCH + Duration::from_millis(1_796_030_000_000 + millis)
        };
        let memory = guest_memory(&said, at(207_500)).unwrap();
        let age = Duration::from_millis(2500);
        let expected = GuestMemory { age, free: 118_530_048, caches: 1_511_424, stalls: 3 };
        assert_eq!(memory, expected);
        // The clock was set back.
        assert_eq!(guest_memory(&said, at(0)).unwrap().age, Duration::ZERO);
        // A newer QEMU, and a guest that lies.
        let mut more = said.clone();
        more["stats"]["stat-alloc-stalls"] = 4.into();
        more["stats"]["stat-oom-kills"] = (u64::MAX - 1).into();
        assert_eq!(guest_memory(&more, at(207_500)).unwrap().stalls, u64::MAX);
        // It has said nothing yet; it has not said how much is free.
        let mut nothing = said.clone();
        nothing["last-update"] = 0.into();
        assert_eq!(guest_memory(&nothing, at(207_500)), None);
        more["stats"]["stat-free-memory"] = u64::MAX.into();
        assert_eq!(guest_memory(&more, at(207_500)), None);
    }
}
