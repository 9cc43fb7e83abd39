//! The balloon of a guest: what it says of the guest, and the two sizes of a pulse.

use std::io;
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::vm::qmp::Qmp;

/// What a guest says of its memory. It may lie: then it harms itself alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct GuestMemory {
    /// Free bytes.
    pub(super) free: u64,
    /// Bytes of files in its caches.
    pub(super) caches: u64,
    /// How often it swapped in or read again what it had dropped.
    pub(super) stalls: u64,
}

/// The balloon of one guest, whatever its VMM.
pub(super) trait Balloon: Send {
    /// What the guest said last; none if it has said nothing yet.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn guest(&mut self) -> io::Result<Option<GuestMemory>>;

    /// Bytes that the guest has outside of its balloon.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn actual(&mut self) -> io::Result<u64>;

    /// Asks the guest to have so many bytes outside of its balloon.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn set(&mut self, bytes: u64) -> io::Result<()>;

    /// Why it would be unsafe, or of no use, to take memory from the guest.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn refusal(&mut self) -> io::Result<Option<String>>;
}

/// From one question of QEMU's to the guest to the next, in seconds: the least that there is.
const STATISTICS_SECONDS: u32 = 1;
/// A virtual machine has at most one.
const BALLOON_TYPE: &str = "virtio-balloon-pci";

/// That of a QEMU.
#[derive(Debug)]
pub(super) struct QemuBalloon {
    qmp: Qmp,
    /// Where QEMU has the device.
    path: String,
}

impl QemuBalloon {
    /// Connects, and has QEMU ask the guest once a second.
    ///
    /// # Errors
    /// Those of the socket; `Unsupported` if the machine has no balloon.
    pub(super) fn new(socket: UnixStream) -> io::Result<Self> {
        let mut qmp = Qmp::new(socket)?;
        let path = find(&mut qmp)?
            .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "it has no balloon"))?;
        let property = "guest-stats-polling-interval";
        let set = json!({"path": path, "property": property, "value": STATISTICS_SECONDS});
        qmp.call("qom-set", set)?;
        Ok(Self { qmp, path })
    }
}

/// The path of a balloon among the devices that have a name, and those that have none.
fn find(qmp: &mut Qmp) -> io::Result<Option<String>> {
    for parent in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let devices = qmp.call("qom-list", json!({"path": parent}))?;
        let is_balloon = |device: &&Value| {
            device["type"].as_str().is_some_and(|kind| kind == format!("child<{BALLOON_TYPE}>"))
        };
        let found = devices.as_array().into_iter().flatten().find(is_balloon);
        if let Some(name) = found.and_then(|device| device["name"].as_str()) {
            return Ok(Some(format!("{parent}/{name}")));
        }
    }
    Ok(None)
}

impl Balloon for QemuBalloon {
    fn guest(&mut self) -> io::Result<Option<GuestMemory>> {
        let get = json!({"path": self.path, "property": "guest-stats"});
        let said = self.qmp.call("qom-get", get)?;
        // What a guest does not say is -1, as an unsigned number.
        let figure = |name: &str| said["stats"][name].as_u64().filter(|it| *it < u64::MAX);
        if said["last-update"].as_i64().is_none_or(|at| at == 0) {
            return Ok(None);
        }
        Ok(figure("stat-free-memory").map(|free| GuestMemory {
            free,
            caches: figure("stat-disk-caches").unwrap_or(0),
            stalls: figure("stat-swap-in").unwrap_or(0),
        }))
    }

    fn actual(&mut self) -> io::Result<u64> {
        let said = self.qmp.call("query-balloon", json!({}))?;
        said["actual"].as_u64().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn set(&mut self, bytes: u64) -> io::Result<()> {
        self.qmp.call("balloon", json!({ "value": bytes })).map(drop)
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        // QEMU from 7.2 on. An older one is asked in vain, and what it would say stays unknown.
        let path = format!("{}/virtio-backend", self.path);
        let status = self.qmp.call("x-query-virtio-status", json!({ "path": path }));
        let features = status.map(|status| status["guest-features"]["dev-features"].to_string());
        let poisons = features.is_ok_and(|features| features.contains("F_PAGE_POISON"));
        Ok(poisons.then(|| "the guest writes a pattern to free pages (page poisoning)".to_owned()))
    }
}
