use std::io::IsTerminal as _;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

/// The terminal of standard input, which passes every key on; as it was when this is dropped.
pub(super) struct RawTerminal(Termios);

impl RawTerminal {
    /// `None` if standard input is no terminal.
    pub(super) fn begin() -> Option<Self> {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).ok().filter(|_| stdin.is_terminal())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
