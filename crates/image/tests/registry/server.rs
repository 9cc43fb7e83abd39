//! Registries of our own making: one that serves what it was given and misbehaves as told, and a
//! proxy that cuts connections.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::support::{CONFIG, INDEX, MANIFEST, sha256};

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
    /// The connection ended in the middle of the body.
    pub cut: bool,
}

impl Asked {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn is_blob(&self) -> bool {
        self.path.contains("/blobs/")
    }
}

/// What is answered.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Bytes of the body after which the connection ends.
    pub cut: Option<usize>,
    /// Bytes of the body after which nothing more comes, the connection staying open.
    pub stall: Option<usize>,
    /// Bytes of the body that are sent in each millisecond.
    pub drip: Option<usize>,
    /// What `Content-Length` says, if not the truth.
    pub length: Option<u64>,
}

impl Answer {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let (headers, body) = (Vec::new(), body.into());
        Self { status, headers, body, cut: None, stall: None, drip: None, length: None }
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub fn error(status: u16, message: &str) -> Self {
        let body = json!({"errors": [{"code": "X", "message": message}]});
        Self::new(status, body.to_string())
    }
}

type Hook = dyn Fn(&Asked, Answer) -> Answer + Send + Sync;

/// A registry of one repository, `app`.
pub struct Fake {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    blobs: Mutex<HashMap<String, (String, Vec<u8>)>>,
    /// Uploads that are not complete.
    uploads: Mutex<Vec<Vec<u8>>>,
    log: Mutex<Vec<Asked>>,
    hook: Box<Hook>,
    ends: AtomicBool,
    hello: Hello,
}

/// What a server that speaks plain HTTP does about a TLS hello.
#[derive(Clone, Copy, Debug)]
pub enum Hello {
    /// Says plainly that this is HTTP, as Go's servers do.
    Refused,
    /// Waits for the end of a line.
    Ignored,
    /// Closes the connection.
    Closed,
}

impl Fake {
    pub fn new(hook: impl Fn(&Asked, Answer) -> Answer + Send + Sync + 'static) -> Self {
        Self::with(hook, Hello::Refused)
    }

    pub fn with(
        hook: impl Fn(&Asked, Answer) -> Answer + Send + Sync + 'static,
        hello: Hello,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (blobs, uploads, log, ends) = Default::default();
        let shared = Arc::new(Shared { blobs, uploads, log, hook: Box::new(hook), ends, hello });
        let ours = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ours.ends.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(stream), shared) = (stream, ours.clone()) else { continue };
                std::thread::spawn(move || drop(converse(stream, &shared)));
            }
        });
        Self { address, shared }
    }

    /// One that does as it should.
    pub fn honest() -> Self {
        Self::new(|_, answer| answer)
    }

    pub fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = sha256(bytes);
        let content = (media_type.to_owned(), bytes.to_vec());
        self.shared.blobs.lock().unwrap().insert(digest.clone(), content);
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    /// Gives a manifest or index a tag.
    pub fn tag(&self, tag: &str, descriptor: &Value) {
        let mut blobs = self.shared.blobs.lock().unwrap();
        let content = blobs[descriptor["digest"].as_str().unwrap()].clone();
        blobs.insert(tag.to_owned(), content);
    }

    /// An image of these layers.
    pub fn image(&self, layers: &[crate::support::Blob]) -> Value {
        let diff_ids: Vec<&str> = layers.iter().map(|l| l.diff_id.as_str()).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = self.blob(CONFIG, config.to_string().as_bytes());
        let layers: Vec<Value> =
            layers.iter().map(|l| self.blob(&l.media_type, &l.bytes)).collect();
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        self.blob(MANIFEST, manifest.to_string().as_bytes())
    }

    pub fn index(&self, manifests: &[Value]) -> Value {
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
        self.blob(INDEX, index.to_string().as_bytes())
    }

    /// All requests so far.
    pub fn log(&self) -> Vec<Asked> {
        self.shared.log.lock().unwrap().clone()
    }

    /// `METHOD path` of all requests that name the repository.
    pub fn asked(&self) -> Vec<String> {
        let log = self.log();
        let ours = log.iter().filter(|asked| asked.path.starts_with("/v2/app/"));
        ours.map(|asked| format!("{} {}", asked.method, &asked.path[8..])).collect()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

fn converse(stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut input = BufReader::new(stream.try_clone()?);
    let mut output = stream;
    if input.fill_buf()?.first() == Some(&0x16) {
        return match shared.hello {
            Hello::Refused => {
                output.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTPS request\n")
            }
            // Until the client has had enough.
            Hello::Ignored => input.read_to_end(&mut Vec::new()).map(drop),
            Hello::Closed => Ok(()),
        };
    }
    while let Some(asked) = request(&mut input, &mut output)? {
        shared.log.lock().unwrap().push(asked.clone());
        let answer = (shared.hook)(&asked, honest(shared, &asked));
        if asked.cut {
            return Ok(());
        }
        if !send(&mut output, &asked, &answer)? {
            return Ok(());
        }
    }
    Ok(())
}

fn request(input: &mut impl BufRead, output: &mut TcpStream) -> io::Result<Option<Asked>> {
    let mut line = String::new();
    if input.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let mut headers = HashMap::new();
    loop {
        line.clear();
        input.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    if headers.contains_key("expect") {
        output.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    let mut body = Vec::new();
    let whole = match headers.get("content-length") {
        Some(length) => {
            let length: u64 = length.parse().unwrap();
            let read = input.by_ref().take(length).read_to_end(&mut body);
            read.is_ok() && body.len() as u64 == length
        }
        None if headers.contains_key("transfer-encoding") => chunks(input, &mut body).is_ok(),
        None => true,
    };
    Ok(Some(Asked { method, path, headers, body, cut: !whole }))
}

/// A body in chunks.
fn chunks(input: &mut impl BufRead, body: &mut Vec<u8>) -> io::Result<()> {
    loop {
        let mut line = String::new();
        input.read_line(&mut line)?;
        let length = u64::from_str_radix(line.trim(), 16).map_err(io::Error::other)?;
        let before = body.len() as u64;
        input.by_ref().take(length).read_to_end(body)?;
        line.clear();
        if body.len() as u64 != before + length || input.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if length == 0 {
            return Ok(());
        }
    }
}

/// Uploads of blobs, and manifests.
fn taken(shared: &Shared, asked: &Asked) -> Option<Answer> {
    let (path, query) = asked.path.split_once('?').unwrap_or((&asked.path, ""));
    let place = path.strip_prefix("/v2/app/")?;
    if let Some(tag) = place.strip_prefix("manifests/").filter(|_| asked.method == "PUT") {
        let digest = sha256(&asked.body);
        let content = (asked.header("content-type").to_owned(), asked.body.clone());
        let mut blobs = shared.blobs.lock().unwrap();
        blobs.insert(digest.clone(), content.clone());
        blobs.insert(tag.to_owned(), content);
        return Some(Answer::new(201, "").with("Docker-Content-Digest", digest));
    }
    let id = place.strip_prefix("blobs/uploads/")?;
    let mut uploads = shared.uploads.lock().unwrap();
    let at = |id: usize| format!("/v2/app/blobs/uploads/{id}");
    if asked.method == "POST" {
        uploads.push(Vec::new());
        return Some(Answer::new(202, "").with("Location", at(uploads.len() - 1)));
    }
    let id: usize = id.parse().unwrap();
    uploads[id].extend_from_slice(&asked.body);
    let range = format!("0-{}", uploads[id].len().saturating_sub(1));
    Some(match asked.method.as_str() {
        "PUT" => {
            let digest = sha256(&uploads[id]);
            match query.strip_prefix("digest=").map(|digest| digest.replace("%3A", ":")) {
                Some(promised) if promised == digest => {
                    let content = (String::new(), std::mem::take(&mut uploads[id]));
                    shared.blobs.lock().unwrap().insert(digest.clone(), content);
                    Answer::new(201, "").with("Docker-Content-Digest", digest)
                }
                _ => Answer::error(400, "provided digest did not match uploaded content"),
            }
        }
        "DELETE" => Answer::new(204, ""),
        "GET" => Answer::new(204, "").with("Location", at(id)).with("Range", range),
        _ => Answer::new(202, "").with("Location", at(id)).with("Range", range),
    })
}

fn honest(shared: &Shared, asked: &Asked) -> Answer {
    if asked.path == "/v2/" {
        return Answer::new(200, "{}");
    }
    if let Some(answer) = taken(shared, asked) {
        return answer;
    }
    let blobs = shared.blobs.lock().unwrap();
    let path = asked.path.split('?').next().unwrap();
    let target = path.strip_prefix("/v2/app/").and_then(|path| path.split_once('/'));
    let Some((kind, (media_type, bytes))) =
        target.and_then(|(kind, name)| Some((kind, blobs.get(name)?)))
    else {
        return Answer::error(404, "manifest unknown");
    };
    if kind == "manifests" {
        return Answer::new(200, bytes.clone())
            .with("Content-Type", media_type)
            .with("Docker-Content-Digest", sha256(bytes));
    }
    let from = asked.header("range").strip_prefix("bytes=").and_then(|r| r.strip_suffix('-'));
    match from.map(|from| from.parse::<usize>().unwrap()) {
        None => Answer::new(200, bytes.clone()),
        Some(from) => Answer::new(206, &bytes[from..])
            .with("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())),
    }
}

/// Sends an answer; false if the connection has to end.
fn send(output: &mut TcpStream, asked: &Asked, answer: &Answer) -> io::Result<bool> {
    let length = answer.length.unwrap_or(answer.body.len() as u64);
    let mut head = format!("HTTP/1.1 {} X\r\nContent-Length: {length}\r\n", answer.status);
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    output.write_all(format!("{head}\r\n").as_bytes())?;
    if asked.method == "HEAD" {
        return Ok(true);
    }
    let end = answer.cut.or(answer.stall).unwrap_or(answer.body.len()).min(answer.body.len());
    for piece in answer.body[..end].chunks(answer.drip.unwrap_or(usize::MAX)) {
        output.write_all(piece)?;
        if answer.drip.is_some() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    if answer.stall.is_some() {
        // Until the other side has had enough of it: a test of one that never has enough hangs.
        let _ = output.read(&mut [0]);
    }
    Ok(answer.cut.is_none() && answer.stall.is_none() && length == answer.body.len() as u64)
}

/// A proxy before a server that ends connections after so many bytes.
pub struct Cutter {
    pub address: SocketAddr,
    pub connections: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
}

/// When to end a connection.
#[derive(Clone)]
struct Cuts {
    /// After so many bytes of the server's.
    down: u64,
    /// After so many of the client's, …
    up: u64,
    /// … if there are cuts of that kind left.
    up_left: Arc<AtomicU64>,
}

impl Cutter {
    /// Ends every connection after so many bytes of the server's.
    pub fn new(server: SocketAddr, bytes: u64) -> Self {
        Self::with(server, Cuts { down: bytes, up: u64::MAX, up_left: Arc::default() })
    }

    /// Ends the first `count` connections on which the client sends more than `bytes`.
    pub fn of_uploads(server: SocketAddr, bytes: u64, count: u64) -> Self {
        Self::with(server, Cuts { down: u64::MAX, up: bytes, up_left: Arc::new(count.into()) })
    }

    fn with(server: SocketAddr, cuts: Cuts) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (connections, ends) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (count, end) = (connections.clone(), ends.clone());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if end.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(server)) else {
                    continue;
                };
                count.fetch_add(1, Ordering::Relaxed);
                let cuts = cuts.clone();
                std::thread::spawn(move || forward(&client, &server, &cuts));
            }
        });
        Self { address, connections, ends }
    }
}

fn forward(client: &TcpStream, server: &TcpStream, cuts: &Cuts) {
    let end = || {
        let _ = client.shutdown(std::net::Shutdown::Both);
        let _ = server.shutdown(std::net::Shutdown::Both);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sent = io::copy(&mut client.take(cuts.up), &mut &*server).unwrap_or(0);
            let fewer = |left: u64| left.checked_sub(1);
            let left = &cuts.up_left;
            if sent == cuts.up
                && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_ok()
            {
                return end();
            }
            let _ = io::copy(&mut &*client, &mut &*server);
        });
        let _ = io::copy(&mut server.take(cuts.down), &mut &*client);
        end();
    });
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}
