//! The thread that steers KSM.

use std::sync::{PoisonError, RwLock};

use cofolio_node::ksm::{KsmPolicy, KsmReport, Steering};
use cofolio_node::run_dir::RunDir;
use cofolio_store::task::Cancel;
use cofolio_store::with_causes;

use crate::guests::wait;
use crate::published::Published;
use crate::serve::{Log, Settings};

/// Steers KSM until it is cancelled, as long as the settings say so. Once it has let go, it tries again
/// only with another policy: whoever else steers KSM may not do so all the time.
pub(crate) fn steer(
    run: &RunDir,
    settings: &RwLock<Settings>,
    published: &Published,
    cancel: &Cancel,
    log: Log<'_>,
) {
    let mut policy: Option<KsmPolicy> = None;
    let mut steering: Option<Steering> = None;
    while !cancel.is_cancelled() {
        let wanted = settings.read().unwrap_or_else(PoisonError::into_inner).ksm;
        let is_new = wanted != policy;
        if is_new {
            policy = wanted;
            steering.take().iter().for_each(Steering::end);
        }
        let report = match (&mut steering, policy.filter(|_| is_new)) {
            (Some(steering), _) => steering.tick(),
            (None, Some(policy)) => Steering::begin(run, policy).map(|begun| {
                log("KSM is on: it merges pages of all programs that allow it, whatever their domain");
                steering = Some(begun);
                KsmReport { steered: true, ..KsmReport::default() }
            }),
            (None, None) => Ok(KsmReport::default()),
        };
        published.set_ksm(report.unwrap_or_else(|error| {
            log(&format!("KSM is left alone: {}", with_causes(&error)));
            steering = None;
            KsmReport::default()
        }));
        wait(Steering::INTERVAL, cancel);
    }
    steering.iter().for_each(Steering::end);
}
