//! The module `http::fuzz` of crate daemon, which only `--cfg fuzzing` builds: it sees what is
//! private there.
//!
//! It takes any bytes and panics where an invariant of its target in `fuzz_targets/` does not hold.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use std::net::IpAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::{Builder, Runtime};

use super::{ConnectionLimits, Peer, serve};
use crate::api::Api;
use crate::auth::{Auth, ReloadableAuth};

/// The token of the server, which a corpus has to know to get past it.
const TOKEN: &str = "fuzz-token-0123456789";

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_time().build().unwrap();
    static API: Arc<Api> = Arc::new(Api::without_ledger());
}

/// What clients send. The first byte says at which socket, the second in pieces of which size.
pub fn connection(data: &[u8]) {
    let [socket, size, data @ ..] = data else { return };
    let peer = match socket % 3 {
        0 => Peer::Local,
        1 => Peer::Remote(Arc::new(ReloadableAuth::new(Auth::for_test(None)))),
        _ => Peer::Remote(Arc::new(ReloadableAuth::new(Auth::for_test(Some(TOKEN))))),
    };
    let answers = RUNTIME.with(|runtime| runtime.block_on(exchange(data, *size, &peer)));
    assert!(answers.is_empty() || answers.starts_with(b"HTTP/1."));
    let contains = |text: &[u8], part: &str| {
        text.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
    };
    let is_allowed = match socket % 3 {
        0 => true,
        1 => {
            let is_host = |line: &[u8]| {
                line.to_ascii_lowercase().starts_with(b"host:") && is_this_machine(&line[5..])
            };
            data.split(|byte| *byte == b'\n').any(is_host)
        }
        _ => contains(data, TOKEN),
    };
    // No body has a line break of HTTP's.
    let is_answered =
        ["HTTP/1.0", "HTTP/1.1"].map(|it| contains(&answers, &format!("{it} 200 OK\r\n")));
    assert!(is_allowed || is_answered == [false, false]);
}

/// Whether a text begins with a name of this machine, however it is written: `[::01]:80` is one.
fn is_this_machine(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    let host = text.trim_start().split(['/', '?', '#', ' ', '\t', '\r', '\n']).next();
    let host = host.unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, _port)| name);
    [host, name].iter().any(|name| {
        let address = name.trim_matches(['[', ']']).parse();
        *name == "localhost" || address.is_ok_and(|address: IpAddr| address.is_loopback())
    })
}

/// All that the server answers before it ends the connection.
async fn exchange(data: &[u8], size: u8, peer: &Peer) -> Vec<u8> {
    let (client, server) = tokio::io::duplex(1 << 16);
    let (mut reader, mut writer) = tokio::io::split(client);
    let permit = ConnectionLimits::new().acquire().await.unwrap();
    let api = API.with(Arc::clone);
    let send = async {
        for piece in data.chunks(usize::from(size).max(1) * 16) {
            // The server may have ended the connection already.
            if writer.write_all(piece).await.is_err() {
                return;
            }
            tokio::task::yield_now().await;
        }
        let _ = writer.shutdown().await;
    };
    let mut answers = Vec::new();
    let receive = async { reader.read_to_end(&mut answers).await };
    let serve = async {
        serve(server, api, peer, &permit).await;
    };
    let (_, _, received) = tokio::join!(send, serve, receive);
    received.unwrap();
    answers
}
