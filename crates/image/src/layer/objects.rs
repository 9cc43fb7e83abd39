//! The threads that hash files and write them to the store.
//!
//! Small files come in batches, large ones as streams. Each sender gets its results on a channel of
//! its own. Queues are bounded; content is shared until it reaches the store.
//!
//! No deadlock: a stream that runs always has a sender that is either done or sending to it, since
//! each layer sends one stream at a time; so some thread always gets free.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;

use cofolio_erofs::tree::InodeId;
use cofolio_store::{Buffer, Staging, Stored};
use crossbeam_channel as channel;

use crate::error::ImportError;
use crate::layer::blob::Slice;
use crate::threads::{NoThread, spawn_up_to};

/// Files up to this many bytes go in batches.
pub(crate) const SMALL_MAX: usize = 1 << 20;
/// A batch is sent when it has this many bytes,
const BATCH_BYTES: u64 = 256 << 10;
/// or this many files.
const BATCH_FILES: usize = 256;
/// Slices of a stream that wait. Most files fit, so the parser goes on to the next one.
const STREAM_QUEUE: usize = 16;

/// A file of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileId {
    pub(crate) inode: InodeId,
    /// Its number in the layer's split; `None` for a file that is nothing but a hole.
    pub(crate) number: Option<u64>,
}

/// What comes next of a large file.
enum Item {
    Data(Slice),
    Hole(u64),
    /// The file is complete. Without it the stream was cut off and is given up.
    End,
}

enum Work {
    Batch(Vec<(FileId, Vec<Slice>)>),
    Stream(FileId, Receiver<Item>),
}

struct Job {
    work: Work,
    staging: Arc<Staging>,
    reply: channel::Sender<Result<Vec<(FileId, Stored)>, ImportError>>,
}

#[derive(Clone)]
pub(crate) struct Workers {
    jobs: channel::Sender<Job>,
}

impl Workers {
    /// Starts `count` threads; they end when the last clone is dropped.
    pub(crate) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        count: usize,
    ) -> Result<Self, NoThread> {
        let (jobs, queue) = channel::bounded::<Job>(count * 2);
        spawn_up_to(scope, count, || {
            let queue = queue.clone();
            move || {
                let mut buffer = Buffer::new(SMALL_MAX);
                for job in queue {
                    let result = run(&job.staging, job.work, &mut buffer);
                    // After its last result a layer has the staging to itself.
                    drop(job.staging);
                    // Nobody listens any more if the layer failed for another reason.
                    let _ = job.reply.send(result);
                }
            }
        })?;
        Ok(Self { jobs })
    }
}

pub(crate) struct Files {
    workers: Workers,
    staging: Arc<Staging>,
    batch: Vec<(FileId, Vec<Slice>)>,
    batch_bytes: u64,
    pending: usize,
    to_us: channel::Sender<Result<Vec<(FileId, Stored)>, ImportError>>,
    replies: channel::Receiver<Result<Vec<(FileId, Stored)>, ImportError>>,
}

impl Files {
    pub(crate) fn new(workers: Workers, staging: Arc<Staging>) -> Self {
        let (to_us, replies) = channel::unbounded();
        Self { workers, staging, batch: Vec::new(), batch_bytes: 0, pending: 0, to_us, replies }
    }

    pub(crate) fn small(&mut self, file: FileId, slices: Vec<Slice>, size: u64) {
        self.batch.push((file, slices));
        self.batch_bytes += size;
        if self.batch_bytes >= BATCH_BYTES || self.batch.len() >= BATCH_FILES {
            self.flush();
        }
    }

    pub(crate) fn flush(&mut self) {
        if !self.batch.is_empty() {
            let batch = std::mem::take(&mut self.batch);
            self.batch_bytes = 0;
            self.send(Work::Batch(batch));
        }
    }

    pub(crate) fn stream(&mut self, file: FileId) -> FileStream {
        self.flush();
        let (to_worker, items) = sync_channel(STREAM_QUEUE);
        self.send(Work::Stream(file, items));
        FileStream(to_worker)
    }

    fn send(&mut self, work: Work) {
        // Workers live as long as there are senders.
        let job = Job { work, staging: self.staging.clone(), reply: self.to_us.clone() };
        if self.workers.jobs.send(job).is_ok() {
            self.pending += 1;
        }
    }

    /// Results that are there; with `all`, waits until nothing is under way.
    pub(crate) fn results(
        &mut self,
        all: bool,
        mut take: impl FnMut(FileId, Stored) -> Result<(), ImportError>,
    ) -> Result<(), ImportError> {
        if all {
            self.flush();
        }
        while self.pending > 0 {
            let reply = if all { self.replies.recv().ok() } else { self.replies.try_recv().ok() };
            let Some(reply) = reply else { break };
            self.pending -= 1;
            for (file, stored) in reply? {
                take(file, stored)?;
            }
        }
        Ok(())
    }
}

/// A large file on its way. Given up if dropped without [`FileStream::end`].
pub(crate) struct FileStream(SyncSender<Item>);

impl FileStream {
    // Sending fails if the worker failed; its reason comes as the result.

    /// Adds content; false if it is not wanted any more.
    pub(crate) fn data(&self, slice: Slice) -> bool {
        self.0.send(Item::Data(slice)).is_ok()
    }

    pub(crate) fn hole(&self, size: u64) -> bool {
        size == 0 || self.0.send(Item::Hole(size)).is_ok()
    }

    pub(crate) fn end(self) -> bool {
        self.0.send(Item::End).is_ok()
    }
}

fn run(
    staging: &Staging,
    work: Work,
    buffer: &mut Buffer,
) -> Result<Vec<(FileId, Stored)>, ImportError> {
    match work {
        Work::Batch(files) => {
            let mut done = Vec::with_capacity(files.len());
            for (file, slices) in files {
                let stored = match &slices[..] {
                    [one] => staging.put_object(one.bytes())?,
                    _ => {
                        buffer.clear();
                        for slice in &slices {
                            let bytes = slice.bytes();
                            buffer.spare()[..bytes.len()].copy_from_slice(bytes);
                            buffer.advance(bytes.len());
                        }
                        staging.put_object(buffer.filled())?
                    }
                };
                done.push((file, stored));
            }
            Ok(done)
        }
        Work::Stream(file, items) => {
            let mut writer = staging.object_writer();
            for item in items {
                match item {
                    Item::Data(slice) => writer.push(slice.bytes())?,
                    Item::Hole(size) => writer.push_hole(size)?,
                    Item::End => return Ok(vec![(file, writer.finish()?)]),
                }
            }
            Ok(Vec::new())
        }
    }
}
