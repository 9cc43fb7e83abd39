//! Looks at processes, which bring the [`State`] up to date: what they map, and in which cgroups
//! they are.

use super::events::Events;
use super::rounds::Rounds;
use super::state::State;
use super::usage::{ObjectId, SuperblockId};
use super::{Budget, LedgerError, Result};
use crate::{address_space, processes};

/// The warnings where the ledger cannot see who uses objects.
const HIDDEN: &str = "this process is not in the machine's first PID namespace and does not see all \
                      processes: containers may be missing, and no object is known to be unused";

const HIDDEN_CGROUPS: &str = "this process is not in the machine's first cgroup namespace, or a \
                              part of the memory cgroups is mounted, and does not see all of them: \
                              containers may be missing, and no object is known to be unused";

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct ProcessLooks {
    /// Processes of this round that are still to be looked at.
    left: Vec<u32>,
    rounds: Rounds,
}

impl ProcessLooks {
    pub(super) fn rounds(&self) -> &Rounds {
        &self.rounds
    }

    /// The next look begins a round, whatever is left of this one.
    pub(super) fn start_over(&mut self) {
        self.left.clear();
    }

    /// See [`Ledger::sample_processes`](super::Ledger::sample_processes).
    pub(super) fn sample(
        &mut self,
        state: &mut State,
        events: &Events,
        budget: &Budget,
    ) -> Result<bool> {
        if self.left.is_empty() {
            let path = state.root.join("proc");
            self.left = processes::all(&state.root).map_err(LedgerError::io(path))?;
            self.rounds.begin(state.now());
            let processes = (!processes::are_all_visible(&state.root)).then_some(HIDDEN);
            let cgroups = state.has_hidden_cgroups().then_some(HIDDEN_CGROUPS);
            let hidden = [processes, cgroups];
            let are_hidden = hidden.iter().any(Option::is_some);
            state.unknown.set_hidden(are_hidden, state.now());
            if are_hidden {
                state.unused.note_missed_opens();
            }
            for what in hidden.into_iter().flatten() {
                self.rounds.add_unseen(|| what.to_owned());
            }
        }
        while let Some(pid) = self.left.pop() {
            if let Err(why) = look_at(pid, state, events) {
                self.rounds.add_unseen(|| format!("process {pid}: {why}"));
            }
            if budget.is_spent() {
                break;
            }
        }
        let is_complete = self.left.is_empty();
        if is_complete {
            self.rounds.complete();
            state.superblocks.round_is_complete();
            state.openers.round_is_complete();
        }
        Ok(is_complete)
    }
}

/// Looks at a process. Says why not all of it could be seen or noted, unless it has ended. One whose
/// main thread has ended has the rest in its other threads.
fn look_at(pid: u32, state: &mut State, events: &Events) -> Result<(), String> {
    let mut maps_files = false;
    let looked = look_at_thread(pid, state, events, &mut maps_files);
    if maps_files || looked.is_err() {
        return looked;
    }
    match processes::live_thread(&state.root, pid) {
        main if main == pid => looked,
        thread => look_at_thread(thread, state, events, &mut maps_files),
    }
}

fn look_at_thread(
    pid: u32,
    state: &mut State,
    events: &Events,
    maps_files: &mut bool,
) -> Result<(), String> {
    let State { superblocks, index, root, .. } = state;
    let mut used = Vec::new();
    let read = processes::mapped(root, pid, |mapping| {
        *maps_files = true;
        let found = superblocks.mapped(root, pid, &mapping, index);
        used.extend(found);
        found.is_some()
    });
    let left_out = superblocks.end_look(root, pid);
    events.mark_new(state);
    let noted = if used.is_empty() { Ok(()) } else { note_mapped(pid, used, state) };
    let process = processes::directory(&state.root, pid);
    let read = read.and_then(|is_read| address_space::check(&process).map(|()| is_read));
    if read.as_ref().is_err_and(address_space::is_unanswered) {
        state.superblocks.keep_seen_by(pid);
    }
    let why = match (read, left_out, noted) {
        (Ok(true), None, Ok(())) => return Ok(()),
        (Err(error), ..) => error.to_string(),
        (Ok(false), ..) => "its list of mappings is too long".to_owned(),
        (Ok(true), Some(why), _) => why.to_owned(),
        (Ok(true), None, Err(why)) => why,
    };
    // It may have ended.
    if process.exists() { Err(why) } else { Ok(()) }
}

/// Notes what a process maps, unless it has ended. Objects that cannot be noted for its cgroup are
/// noted for somebody unknown, and the reason is returned.
fn note_mapped(
    pid: u32,
    used: Vec<(SuperblockId, ObjectId)>,
    state: &mut State,
) -> Result<(), String> {
    let cgroup = match state.cgroup_of(pid) {
        Err(error) if processes::has_ended(&error) => return Ok(()),
        Err(error) => Err(format!("its cgroup: {error}")),
        Ok(None) => Err("there is no room for the path of its cgroup".to_owned()),
        Ok(Some(cgroup)) => Ok(cgroup),
    };
    if let Ok(cgroup) = cgroup {
        state.learn_root(pid, cgroup);
    }
    let mut fits = true;
    for (mount, object) in used {
        if !cgroup.as_ref().is_ok_and(|cgroup| state.note_use(mount, *cgroup, object)) {
            state.note_unknown_use(mount, object);
            fits = false;
        }
    }
    cgroup?;
    fits.then_some(()).ok_or_else(|| "there is no room for all that it uses".to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::{Ledger, of_an_empty_machine};
    use super::*;
    use crate::cgroup::{CgroupError, Hierarchy, Version};

    /// Says in which namespaces this process is.
    fn plant_namespaces(root: &Path, pid: &str, cgroup: &str) {
        let of = root.join("proc/thread-self/ns");
        fs::create_dir_all(&of).unwrap();
        for (name, namespace) in [("pid", pid), ("cgroup", cgroup)] {
            let _ = fs::remove_file(of.join(name));
            std::os::unix::fs::symlink(namespace, of.join(name)).unwrap();
        }
    }

    const FIRST_PID: &str = "pid:[4026531836]";
    const FIRST_CGROUP: &str = "cgroup:[4026531835]";

    /// What a process mapped was in nobody's use if its cgroup could not be read or there was no
    /// room for the use, and was dropped as another container's own.
    #[test]
    fn mapped_objects_that_cannot_be_noted_are_in_use_by_somebody_unknown() {
        let (root, Ledger { mut state, .. }) = of_an_empty_machine();
        let unknown = |state: &mut State, object, pid| {
            let noted = note_mapped(pid, vec![(SuperblockId(0), ObjectId(object))], state);
            let mut uses = state.unknown.uses(state.now());
            (noted.is_ok(), uses.any(|(used, _)| used == ObjectId(object)))
        };
        let plant = |pid: u32| {
            let process = processes::directory(root.path(), pid);
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("stat"), "1 (a) S 0 0 0 0 0 0\n").unwrap();
            process.join("cgroup")
        };
        fs::write(plant(1), "1:memory:/\n0::/\n").unwrap();
        assert_eq!(unknown(&mut state, 1, 1), (true, false));
        // A directory cannot be read.
        fs::create_dir(plant(2)).unwrap();
        assert_eq!(unknown(&mut state, 2, 2), (false, true));
        assert_eq!(unknown(&mut state, 3, 3), (true, false), "it has ended");
        // In a cgroup namespace. It was noted for a cgroup that the next refresh took for removed.
        state.hierarchy = Ok(Hierarchy::at(Version::V2, root.path()));
        fs::write(plant(4), "0::/../b\n").unwrap();
        assert_eq!(unknown(&mut state, 5, 4), (false, true));
        state.refresh_users();
        assert_eq!(state.cgroups.ended(), []);
        state.uses.bytes_max = 0;
        assert_eq!(unknown(&mut state, 4, 1), (false, true));
    }

    /// In a PID namespace there were no containers, nothing was unknown, and the pages that hidden
    /// processes used were anybody's to drop.
    #[test]
    fn hidden_processes_may_use_everything() {
        let (root, mut ledger) = of_an_empty_machine();
        plant_namespaces(root.path(), "pid:[7]", FIRST_CGROUP);
        assert!(ledger.sample_processes(&Budget::UNLIMITED).unwrap());
        assert_eq!(ledger.processes.rounds.unseen().why, [HIDDEN]);
        assert!(ledger.state.unknown.missed(ledger.state.now()).is_some());
    }

    /// In a cgroup namespace, and where a part of the cgroups is mounted, those of others have no
    /// directory. Each refresh took them for removed and dropped what they used as left behind.
    #[test]
    fn hidden_cgroups_may_use_everything() {
        let other_root = CgroupError::OtherRoot { mount: "/m".into(), root: "/docker/x".into() };
        let at_top = || Ok(Hierarchy::at(Version::V2, Path::new("/nowhere")));
        for (hierarchy, namespace, why) in [
            (at_top(), FIRST_CGROUP, None),
            (at_top(), "cgroup:[7]", Some(HIDDEN_CGROUPS)),
            (Err(other_root), FIRST_CGROUP, Some(HIDDEN_CGROUPS)),
        ] {
            let (root, mut ledger) = of_an_empty_machine();
            ledger.state.hierarchy = hierarchy;
            plant_namespaces(root.path(), FIRST_PID, namespace);
            assert!(ledger.sample_processes(&Budget::UNLIMITED).unwrap());
            assert_eq!(ledger.processes.rounds.unseen().why, Vec::from_iter(why));
            let missed = ledger.state.unknown.missed(ledger.state.now());
            assert_eq!(missed.is_some(), why.is_some());
        }
    }
}
