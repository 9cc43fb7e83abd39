//! HTTP connections: limits on what a client can make the daemon hold and wait for.

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/http.rs"]
pub mod fuzz;

use std::convert::Infallible;
use std::future::{poll_fn, ready};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::api::Api;
use crate::auth::ReloadableAuth;

pub(crate) type Reply = Response<Bytes>;

/// Connections at one time: for each TCP address, where more wait in the kernel's queue; and at a
/// unix socket for root and for all others, where more are refused.
const CONNECTIONS_MAX: usize = 64;
/// Connections at one time whose request is refused, because there is no room for them. Others end
/// without an answer.
const REFUSALS_MAX: usize = 64;
/// How long such a client may take to send its request.
const REFUSAL_TIME: Duration = Duration::from_secs(2);
/// Clients at one time in a TLS handshake, or waiting for a permit after it, for each TCP address.
const HANDSHAKES_MAX: usize = 64;
/// Bytes of a request's head.
const HEAD_MAX: usize = 16 << 10;
/// How long a TLS handshake, a head or a body may take to arrive, the time before its first byte
/// included.
pub(crate) const HEAD_TIME: Duration = Duration::from_secs(30);
/// How long a connection may last. Then it ends with the answer that is on its way, which has another
/// [`HEAD_TIME`] to be read from when it is made: a reclaim may take long.
const CONNECTION_TIME: Duration = Duration::from_secs(300);
/// Bytes of large answers that clients have not read yet, for each of these limits. With more,
/// requests for others are refused. One answer may be as large by itself.
const UNREAD_MAX: usize = 64 << 20;
/// Smaller answers are not counted: their number is limited by that of connections.
const SMALL: usize = 16 << 10;
/// What [`UNREAD_MAX`] is counted in.
const UNIT: usize = 1 << 10;

/// Limits of one socket, or of some of its clients: connections, and what was not read of them.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionLimits {
    connections: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
    handshakes: Arc<Semaphore>,
    unread: Arc<Semaphore>,
    /// Whether connections are to end.
    ending: watch::Sender<bool>,
}

/// The permit of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    _connection: OwnedSemaphorePermit,
    unread: Arc<Semaphore>,
    ending: watch::Sender<bool>,
}

impl ConnectionLimits {
    pub(crate) fn new() -> Self {
        Self {
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            refusals: Arc::new(Semaphore::new(REFUSALS_MAX)),
            handshakes: Arc::new(Semaphore::new(HANDSHAKES_MAX)),
            unread: Arc::new(Semaphore::new(UNREAD_MAX / UNIT)),
            ending: watch::Sender::new(false),
        }
    }

    /// Waits until another connection may be served.
    pub(crate) async fn acquire(&self) -> Option<ConnectionPermit> {
        let connection = Arc::clone(&self.connections).acquire_owned().await.ok()?;
        Some(self.permit(connection))
    }

    /// `None` if no other connection may be served now.
    pub(crate) fn try_acquire(&self) -> Option<ConnectionPermit> {
        let connection = Arc::clone(&self.connections).try_acquire_owned().ok()?;
        Some(self.permit(connection))
    }

    /// A permit to refuse a connection.
    pub(crate) fn try_acquire_refusal(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.refusals).try_acquire_owned().ok()
    }

    fn permit(&self, connection: OwnedSemaphorePermit) -> ConnectionPermit {
        let (unread, ending) = (Arc::clone(&self.unread), self.ending.clone());
        ConnectionPermit { _connection: connection, unread, ending }
    }

    /// Waits until another handshake may begin. Clients without the right certificate do not get
    /// beyond it, and take no permit. Those without the right token take one for one request.
    pub(crate) async fn acquire_handshake(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.handshakes).acquire_owned().await.ok()
    }
}

/// Ends these tasks, which accept connections, has all connections end with the answers that are on
/// their way, and waits for that.
pub(crate) async fn end(accepting: Vec<(JoinHandle<()>, Vec<ConnectionLimits>)>) {
    // All of them before the first is waited for.
    for (task, limits) in &accepting {
        task.abort();
        limits.iter().for_each(|limits| _ = limits.ending.send_replace(true));
    }
    let all = u32::try_from(CONNECTIONS_MAX).unwrap_or(u32::MAX);
    for (task, limits) in accepting {
        let _ = task.await;
        for limits in limits {
            let _ = limits.connections.acquire_many(all).await;
        }
    }
}

impl ConnectionPermit {
    /// The answer, counted as unread until its bytes are dropped.
    fn counted(&self, answer: Reply) -> Reply {
        let bytes = answer.body().len();
        if bytes <= SMALL {
            return answer;
        }
        let units = u32::try_from(bytes.min(UNREAD_MAX) / UNIT).unwrap_or(u32::MAX);
        let Ok(permit) = Arc::clone(&self.unread).try_acquire_many_owned(units) else {
            return crate::api::refusal(
                StatusCode::SERVICE_UNAVAILABLE,
                "too many large answers are unread, try again later",
            );
        };
        answer.map(|bytes| Bytes::from_owner(Unread { bytes, _permit: permit }))
    }
}

/// Bytes of an answer with their permit.
struct Unread {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Whose connection it is, which says what it may do.
#[derive(Clone)]
pub(crate) enum Peer {
    /// Its client is root or in the configured group.
    Local,
    /// Anybody could have connected: [`ReloadableAuth`] decides about each request, which may only
    /// read.
    Remote(Arc<ReloadableAuth>),
}

/// Answers the requests of one connection.
pub(crate) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    api: Arc<Api>,
    peer: &Peer,
    permit: &ConnectionPermit,
) {
    // When the last answer was made; locked while one is.
    let answering = &Mutex::new(Instant::now());
    let service = service_fn(|request: Request<Incoming>| {
        let api = Arc::clone(&api);
        async move {
            let mut made = answering.lock().await;
            let answer = permit.counted(api.answer(request, peer).await);
            *made = Instant::now();
            api.metrics.count_request(answer.status());
            Ok::<_, Infallible>(answer.map(Full::new))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service);
    // Errors are the client's: it has gone, or does not speak HTTP.
    let mut connection = pin!(connection);
    let mut ending = permit.ending.subscribe();
    let mut ending = pin!(ending.wait_for(|ending| *ending));
    let ends = poll_fn(|context| match connection.as_mut().poll(context) {
        Poll::Ready(_) => Poll::Ready(true),
        Poll::Pending => ending.as_mut().poll(context).map(|_| false),
    });
    if tokio::time::timeout(CONNECTION_TIME, ends).await != Ok(true) {
        // The answer that is on its way may still arrive.
        connection.as_mut().graceful_shutdown();
        let mut until = Instant::now() + HEAD_TIME;
        while tokio::time::timeout_at(until, connection.as_mut()).await.is_err() {
            let made = answering.try_lock().map_or_else(|_| Instant::now(), |made| *made);
            if made + HEAD_TIME <= until {
                break;
            }
            until = made + HEAD_TIME;
        }
    }
}

/// Refuses the request of a connection for which there is no room: an answer before the request
/// would be an error to clients.
pub(crate) async fn refuse(stream: impl AsyncRead + AsyncWrite + Unpin, api: Arc<Api>) {
    let service = service_fn(|_: Request<Incoming>| {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        api.metrics.count_request(status);
        let answer = crate::api::refusal(status, "too many connections, try again later");
        ready(Ok::<_, Infallible>(answer.map(Full::new)))
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let _ = tokio::time::timeout(REFUSAL_TIME, connection).await;
}

/// Answers the requests of one TCP connection, after the TLS handshake if there is TLS, and when
/// there is a permit. It is counted as a handshake until then.
pub(crate) async fn serve_remote(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    api: Arc<Api>,
    auth: Arc<ReloadableAuth>,
    limits: ConnectionLimits,
    handshake: OwnedSemaphorePermit,
) {
    let current = auth.current();
    let peer = Peer::Remote(auth);
    let permit = async {
        let permit = limits.acquire().await;
        drop(handshake);
        permit
    };
    match current.tls() {
        None => {
            if let Some(permit) = permit.await {
                serve(stream, api, &peer, &permit).await;
            }
        }
        Some(tls) => {
            // A client without a right certificate fails here.
            if let Ok(Ok(stream)) = tokio::time::timeout(HEAD_TIME, tls.accept(stream)).await
                && let Some(permit) = permit.await
            {
                serve(stream, api, &peer, &permit).await;
            }
        }
    }
}

pub(crate) fn reply(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(body.into());
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    reply
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::time::sleep;

    use super::*;
    use crate::auth::Auth;
    use crate::worker::{BegunReclaim, Question};
    use cofolio_node::ledger::Reclaimed;
    use cofolio_store::task::Cancel;

    /// Runs a test with a clock that jumps to the next timer when nothing else can run.
    fn with_clock(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
    }

    /// A client's end of a served connection, and what ends with it.
    async fn connect() -> (DuplexStream, JoinHandle<()>) {
        connect_to(Api::without_ledger(), &ConnectionLimits::new()).await
    }

    async fn connect_to(api: Api, limits: &ConnectionLimits) -> (DuplexStream, JoinHandle<()>) {
        let (client, server) = tokio::io::duplex(4096);
        let permit = limits.acquire().await.unwrap();
        let api = Arc::new(api);
        let serving = tokio::spawn(async move { serve(server, api, &Peer::Local, &permit).await });
        (client, serving)
    }

    const RECLAIM: &[u8] = b"POST /v1/reclaim HTTP/1.1\r\nContent-Length: 28\r\n\r\n\
        {\"target\": {\"domain\": \"it\"}}";

    /// Sends a reclaim. Gives the connection, and the question that it became.
    async fn reclaim(limits: &ConnectionLimits) -> (DuplexStream, Question) {
        let (api, questions) = Api::with_questions();
        let (mut client, _) = connect_to(api, limits).await;
        client.write_all(RECLAIM).await.unwrap();
        loop {
            if let Ok(question) = questions.try_recv() {
                return (client, question);
            }
            sleep(Duration::from_millis(1)).await;
        }
    }

    async fn answer_of(client: &mut DuplexStream) -> String {
        let mut answer = vec![0; 4096];
        let count = client.read(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer[..count]).into_owned()
    }

    /// Sends a text and then a piece again and again until the server ends the connection. Gives
    /// the bytes that were sent, and the answer.
    async fn send(
        client: DuplexStream,
        text: &str,
        piece: &[u8],
        every: Duration,
    ) -> (usize, String) {
        let (mut reader, mut writer) = tokio::io::split(client);
        let answer = tokio::spawn(async move {
            let mut answer = Vec::new();
            let _ = reader.read_to_end(&mut answer).await;
            String::from_utf8(answer).unwrap()
        });
        let mut sent = text.len();
        writer.write_all(text.as_bytes()).await.unwrap();
        while writer.write_all(piece).await.is_ok() {
            sent += piece.len();
            sleep(every).await;
        }
        (sent, answer.await.unwrap())
    }

    #[test]
    fn a_silent_or_slow_client_loses_its_connection() {
        with_clock(async {
            let start = Instant::now();
            let (_client, serving) = connect().await;
            serving.await.unwrap();
            assert_eq!(start.elapsed().as_secs(), HEAD_TIME.as_secs());

            let start = Instant::now();
            let (client, serving) = connect().await;
            let second = Duration::from_secs(1);
            let (sent, _) = send(client, "GET /v1/version HTTP/1.1\r\n", b"a", second).await;
            serving.await.unwrap();
            // The server ended before the client's next byte.
            assert!(start.elapsed() <= HEAD_TIME + second, "{:?}", start.elapsed());
            assert!(sent < 100, "{sent}");
        });
    }

    #[test]
    fn endless_heads_and_bodies_are_not_read() {
        with_clock(async {
            let (client, serving) = connect().await;
            let line = b"a: bcdefghijklmnopqrstuvwxyz\r\n";
            let get = "GET /v1/version HTTP/1.1\r\n";
            let (sent, answer) = send(client, get, line, Duration::ZERO).await;
            serving.await.unwrap();
            assert!(sent < 4 * HEAD_MAX, "{sent}");
            assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

            for length in ["Content-Length: 1099511627776", "Transfer-Encoding: chunked"] {
                let (client, serving) = connect().await;
                let post = format!("POST /v1/nothing HTTP/1.1\r\n{length}\r\n\r\n");
                let (sent, answer) = send(client, &post, b"3\r\nabc\r\n", Duration::ZERO).await;
                serving.await.unwrap();
                assert!(sent < 16 * HEAD_MAX, "{length}: {sent}");
                assert!(answer.starts_with("HTTP/1.1 404"), "{length}: {answer}");
            }
        });
    }

    /// Reclaiming is the only request with a body that is read.
    #[test]
    fn a_body_is_read_up_to_a_size_and_for_a_time() {
        let post = |length| format!("POST /v1/reclaim HTTP/1.1\r\n{length}\r\n\r\n");
        with_clock(async {
            for length in ["Content-Length: 1099511627776", "Transfer-Encoding: chunked"] {
                let (client, serving) = connect().await;
                let post = post(length);
                let (sent, answer) = send(client, &post, b"3\r\nabc\r\n", Duration::ZERO).await;
                serving.await.unwrap();
                assert!(sent < 64 * HEAD_MAX, "{length}: {sent}");
                assert!(answer.starts_with("HTTP/1.1 413"), "{length}: {answer}");
            }
            let start = Instant::now();
            let (client, serving) = connect().await;
            let (every, post) = (Duration::from_secs(10), post("Content-Length: 60000"));
            let (_, answer) = send(client, &post, b" ", every).await;
            serving.await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
            assert!(start.elapsed() <= HEAD_TIME + every, "{:?}", start.elapsed());
        });
    }

    /// A request with two names of the host was answered, whichever of them somebody in between had
    /// checked. A refused method was told of methods that the path has not.
    #[test]
    fn odd_requests_are_refused() {
        with_clock(async {
            for (request, status, header) in [
                ("GET /v1/version HTTP/1.1\r\nHost: a\r\nHost: a", 400, ""),
                ("DELETE /v1/report HTTP/1.1", 405, "allow: GET, HEAD\r\n"),
                ("POST / HTTP/1.1", 405, "allow: GET, HEAD\r\n"),
                ("GET /v1/reclaim HTTP/1.1", 405, "allow: POST\r\n"),
                ("OPTIONS /v1/sample HTTP/1.1", 405, "allow: POST\r\n"),
                ("DELETE /v1/nothing HTTP/1.1", 404, ""),
            ] {
                let (mut client, _) = connect().await;
                client.write_all(format!("{request}\r\n\r\n").as_bytes()).await.unwrap();
                let answer = answer_of(&mut client).await;
                let is_it = answer.starts_with(&format!("HTTP/1.1 {status}"));
                assert!(is_it && answer.contains(header), "{request}: {answer}");
            }
        });
    }

    /// A client heard that the ledger is busy while its reclaim went on. One that has begun is
    /// answered, however long it takes, and one that was refused does not begin.
    #[test]
    fn a_reclaim_is_refused_or_answered() {
        with_clock(async {
            let limits = ConnectionLimits::new();
            let (mut client, question) = reclaim(&limits).await;
            let Question::Reclaim(_, begun) = question else { panic!("{question:?}") };
            sleep(Duration::from_secs(59)).await;
            let (answer, it) = BegunReclaim::new(Cancel::default());
            begun.send(Ok(it)).unwrap();
            sleep(2 * CONNECTION_TIME).await;
            let reclaimed = Reclaimed { freed_bytes: 7, ..Reclaimed::default() };
            answer.send(Ok(reclaimed)).unwrap();
            let said = answer_of(&mut client).await;
            assert!(
                said.starts_with("HTTP/1.1 200") && said.contains("\"freed_bytes\":7"),
                "{said}"
            );

            let (mut client, question) = reclaim(&limits).await;
            let said = answer_of(&mut client).await;
            assert!(said.starts_with("HTTP/1.1 503"), "{said}");
            let Question::Reclaim(_, begun) = question else { panic!("{question:?}") };
            assert!(begun.send(Ok(BegunReclaim::new(Cancel::default()).1)).is_err());
        });
    }

    /// Whoever ended `cofolio reclaim --all` could not end the reclaim, which went on dropping pages.
    #[test]
    fn a_reclaim_ends_when_its_client_leaves() {
        with_clock(async {
            let (client, question) = reclaim(&ConnectionLimits::new()).await;
            let Question::Reclaim(_, begun) = question else { panic!("{question:?}") };
            let cancel = Cancel::default();
            let (_answer, it) = BegunReclaim::new(cancel.clone());
            begun.send(Ok(it)).unwrap();
            sleep(Duration::from_secs(1)).await;
            assert!(!cancel.is_cancelled());
            drop(client);
            sleep(Duration::from_secs(1)).await;
            assert!(cancel.is_cancelled());
        });
    }

    /// SIGTERM cut answers that were on their way.
    #[test]
    fn at_the_end_answers_on_their_way_arrive() {
        with_clock(async {
            let (start, limits) = (Instant::now(), ConnectionLimits::new());
            let (_idle, serving) = connect_to(Api::without_ledger(), &limits).await;
            let (mut client, question) = reclaim(&limits).await;
            let accepting = tokio::spawn(std::future::pending());
            let ending = tokio::spawn(end(vec![(accepting, vec![limits])]));
            serving.await.unwrap();
            sleep(Duration::from_secs(1)).await;
            // The ledger's thread has ended.
            drop(question);
            let said = answer_of(&mut client).await;
            assert!(said.starts_with("HTTP/1.1 503"), "{said}");
            ending.await.unwrap();
            assert_eq!(start.elapsed().as_secs(), 1);
        });
    }

    /// Clients of one socket were told only when all answers to those of another had arrived, for
    /// which five seconds may not be enough.
    #[test]
    fn at_the_end_clients_of_all_sockets_are_told_at_once() {
        with_clock(async {
            let (busy, idle) = (ConnectionLimits::new(), ConnectionLimits::new());
            let (_client, _question) = reclaim(&busy).await;
            let (_idle, serving) = connect_to(Api::without_ledger(), &idle).await;
            let accepting = [busy, idle].map(|it| (tokio::spawn(std::future::pending()), vec![it]));
            tokio::spawn(end(accepting.into()));
            let second = Duration::from_secs(1);
            tokio::time::timeout(second, serving).await.unwrap().unwrap();
        });
    }

    /// The time to read an answer ended every half minute from the end of the connection on, even
    /// if the answer was made just before that.
    #[test]
    fn a_late_answer_has_its_time_to_be_read() {
        with_clock(async {
            let (api, questions) = Api::with_questions();
            // The answer does not fit into the pipe.
            let (mut client, server) = tokio::io::duplex(16);
            let permit = ConnectionLimits::new().acquire().await.unwrap();
            let api = Arc::new(api);
            tokio::spawn(async move { serve(server, api, &Peer::Local, &permit).await });
            client.write_all(RECLAIM).await.unwrap();
            let second = Duration::from_secs(1);
            sleep(second).await;
            let Ok(Question::Reclaim(_, begun)) = questions.try_recv() else { panic!() };
            let (answer, it) = BegunReclaim::new(Cancel::default());
            begun.send(Ok(it)).unwrap();
            sleep(CONNECTION_TIME + HEAD_TIME - 2 * second).await;
            answer.send(Ok(Reclaimed::default())).unwrap();
            sleep(HEAD_TIME - second).await;
            let mut said = String::new();
            client.read_to_string(&mut said).await.unwrap();
            assert!(said.ends_with('}'), "{said}");
        });
    }

    /// Clients that began handshakes and did not end them took the permits of those that had.
    #[test]
    fn handshakes_take_no_permits() {
        with_clock(async {
            let (limits, mut silent) = (ConnectionLimits::new(), Vec::new());
            let auth = Arc::new(ReloadableAuth::new(Auth::with_tls_for_test()));
            let api = Arc::new(Api::without_ledger());
            for _ in 0..HANDSHAKES_MAX {
                let handshake = limits.acquire_handshake().await.unwrap();
                let (client, server) = tokio::io::duplex(64);
                let (api, auth) = (Arc::clone(&api), Arc::clone(&auth));
                tokio::spawn(serve_remote(server, api, auth, limits.clone(), handshake));
                silent.push(client);
            }
            let second = Duration::from_secs(1);
            assert!(tokio::time::timeout(second, limits.acquire_handshake()).await.is_err());
            assert_eq!(limits.connections.available_permits(), CONNECTIONS_MAX);
            sleep(HEAD_TIME).await;
            assert_eq!(limits.handshakes.available_permits(), HANDSHAKES_MAX);
        });
    }

    /// A client that says nothing, and one that goes on sending parts of a handshake.
    #[test]
    fn a_tls_handshake_has_a_time() {
        with_clock(async {
            for parts in [&b""[..], &[22, 3, 1, 0x40, 0]] {
                let (start, limits) = (Instant::now(), ConnectionLimits::new());
                let (mut client, server) = tokio::io::duplex(4096);
                let handshake = limits.acquire_handshake().await.unwrap();
                let auth = Arc::new(ReloadableAuth::new(Auth::with_tls_for_test()));
                let api = Arc::new(Api::without_ledger());
                let serving = tokio::spawn(serve_remote(server, api, auth, limits, handshake));
                let second = Duration::from_secs(1);
                let mut sent = 0;
                while !parts.is_empty() && client.write_all(&parts[sent.min(4)..]).await.is_ok() {
                    (sent, _) = (sent + 1, sleep(second).await);
                }
                serving.await.unwrap();
                assert!(start.elapsed() <= HEAD_TIME + second, "{:?}", start.elapsed());
            }
        });
    }

    #[test]
    fn connections_beyond_the_limit_wait() {
        with_clock(async {
            let limits = ConnectionLimits::new();
            let mut taken = Vec::new();
            for _ in 0..CONNECTIONS_MAX {
                taken.push(limits.acquire().await.unwrap());
            }
            let one_more = || tokio::time::timeout(CONNECTION_TIME, limits.acquire());
            assert!(one_more().await.is_err());
            drop(taken.pop());
            assert!(one_more().await.is_ok());
        });
    }

    /// It may send more requests, but no more are answered than are read.
    #[test]
    fn a_client_that_does_not_read_loses_its_connection() {
        with_clock(async {
            let start = Instant::now();
            let (client, serving) = connect().await;
            let (reader, mut writer) = tokio::io::split(client);
            let mut sent = 0;
            let requests = b"GET /style.css HTTP/1.1\r\n\r\n";
            while writer.write_all(requests).await.is_ok() {
                sent += requests.len();
            }
            serving.await.unwrap();
            assert_eq!(start.elapsed(), CONNECTION_TIME + HEAD_TIME);
            assert!(sent < 4 * HEAD_MAX, "{sent}");
            drop(reader);
        });
    }

    #[test]
    fn unread_answers_are_limited_together() {
        with_clock(async {
            let limits = ConnectionLimits::new();
            let (one, two) = (limits.acquire().await.unwrap(), limits.acquire().await.unwrap());
            let large = || reply(StatusCode::OK, "text/plain", vec![b'x'; UNREAD_MAX / 4]);
            let answer = |permit: &ConnectionPermit| permit.counted(large());
            let mut held: Vec<Reply> = (0..4).map(|_| answer(&one)).collect();
            assert!(held.iter().all(|answer| answer.status() == StatusCode::OK));
            assert_eq!(answer(&two).status(), StatusCode::SERVICE_UNAVAILABLE);
            // Small ones are answered all the same, and large ones once there is room.
            let small = reply(StatusCode::OK, "text/plain", "x");
            assert_eq!(two.counted(small).status(), StatusCode::OK);
            drop(held.pop());
            assert_eq!(answer(&two).status(), StatusCode::OK);
            // One answer may be larger than the limit, alone.
            drop(held);
            let huge = reply(StatusCode::OK, "text/plain", vec![b'x'; UNREAD_MAX + 1]);
            assert_eq!(one.counted(huge).status(), StatusCode::OK);
        });
    }
}
