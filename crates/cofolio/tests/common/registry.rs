//! Debian's docker-registry on loopback.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::Sandbox;

/// A registry on loopback that runs until it is dropped.
pub(crate) struct Registry {
    child: Child,
    pub(crate) host: String,
}

impl Registry {
    pub(crate) fn start(binary: &Path, sandbox: &Sandbox) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let host = format!("127.0.0.1:{port}");
        let config = sandbox.path("registry.yml");
        let data = sandbox.text("registry");
        let text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {data}\nhttp:\n  addr: {host}\n"
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new(binary);
        command.arg("serve").arg(&config).stdout(Stdio::null()).stderr(Stdio::null());
        let registry = Self { child: command.spawn().unwrap(), host };
        let until = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(&registry.host).is_err() {
            assert!(Instant::now() < until, "docker-registry does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
