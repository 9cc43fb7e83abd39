//! Ctrl-C, SIGTERM and SIGHUP cancel running work, which then undoes what it has begun. A second
//! signal, or one without running work, ends the process at once.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use cofolio_store::task::Cancel;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::{SigId, flag, low_level};

use crate::exit::Exit;

/// What signals do in this process.
struct Handlers {
    /// How much work is under way: one piece may be a part of another.
    works: usize,
    /// There is none.
    is_idle: Arc<AtomicBool>,
    ids: Vec<SigId>,
}

static HANDLERS: Mutex<Option<Handlers>> = Mutex::new(None);
static IS_CANCELLED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// What a signal cancels, whatever work it will be.
pub fn cancel() -> Cancel {
    Cancel::by_flag(IS_CANCELLED.clone())
}

/// Work that signals cancel, as long as this lives.
#[derive(Debug)]
#[must_use = "signals cancel the work only while it lives"]
pub struct Cancellable {
    /// What a signal cancels.
    pub cancel: Cancel,
}

impl Cancellable {
    /// Begins work that signals cancel. Fails if the system refuses to set a handler.
    pub fn begin() -> io::Result<Self> {
        let mut handlers = HANDLERS.lock().unwrap_or_else(PoisonError::into_inner);
        let handlers = match &mut *handlers {
            Some(handlers) => handlers,
            none => none.insert(Handlers::register()?),
        };
        handlers.works += 1;
        handlers.is_idle.store(false, SeqCst);
        Ok(Self { cancel: cancel() })
    }
}

impl Drop for Cancellable {
    fn drop(&mut self) {
        let mut handlers = HANDLERS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handlers) = &mut *handlers {
            // It may have begun before others were released.
            handlers.works = handlers.works.saturating_sub(1);
            handlers.is_idle.store(handlers.works == 0, SeqCst);
        }
    }
}

impl Handlers {
    fn register() -> io::Result<Self> {
        // Until all of them are registered a signal does what it did before.
        let is_idle = Arc::new(AtomicBool::new(true));
        let mut ids = Vec::new();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            ids.push(flag::register_conditional_default(signal, is_idle.clone())?);
            let code = i32::from(Exit::Interrupted as u8);
            ids.push(flag::register_conditional_shutdown(signal, code, IS_CANCELLED.clone())?);
            ids.push(flag::register(signal, IS_CANCELLED.clone())?);
        }
        Ok(Self { works: 0, is_idle, ids })
    }
}

/// Lets a write beyond `ulimit -f` fail with EFBIG instead of killing the process with SIGXFSZ.
/// Child processes would inherit an ignored signal, but no handler. Fails if the system refuses it.
pub fn survive_file_size_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Unregisters the handlers; the caller has set its own already.
pub fn release() {
    let mut handlers = HANDLERS.lock().unwrap_or_else(PoisonError::into_inner);
    for id in handlers.take().into_iter().flat_map(|handlers| handlers.ids) {
        low_level::unregister(id);
    }
}
