//! The daemon: the ledger of a store over HTTP, as JSON and as metrics, and scheduled upkeep.
//!
//! ```text
//!   clients ──▶ unix socket, authenticated TCP ──▶ http ──▶ api ──▶ the last report (shared)
//!                    (async, one thread)                └────▶ questions ─▶ ledger thread
//!                                                                            │
//!                                   gc and scrub threads                   Ledger
//! ```
//!
//! This is the only crate with async code, and it does nothing itself: the ledger and upkeep are
//! `cofolio-node`'s. Nothing depends on the daemon. When it stops or is killed, containers and
//! mounts go on, and the next one reads their state from the run directory and the kernel.
//!
//! [`Client`] asks a running daemon. It blocks, so that its users need no async.

mod answers;
mod api;
mod auth;
mod client;
mod dashboard;
mod guests;
mod http;
mod ksm;
mod listen;
mod metrics;
mod pace;
mod published;
mod runtime;
mod serve;
mod upkeep;
mod worker;

pub use answers::{Files, Users, Version};
pub use auth::AuthFiles;
pub use client::{Client, ClientError};
#[cfg(fuzzing)]
pub use http::fuzz;
pub use listen::ListenError;
pub use serve::{DaemonError, Log, Options, Reload, Settings, serve};
pub use upkeep::Schedule;
