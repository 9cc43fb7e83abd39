//! Signals by their names, as image configs name them.

use rustix::process::Signal;

/// The real-time signals of Linux that the C library leaves to programs: `SIGRTMIN` and `SIGRTMAX`.
const REAL_TIME: (i32, i32) = (34, 64);

/// The names of signal(7) without `SIG`, synonyms included.
const NAMES: [(&str, Signal); 34] = [
    ("ABRT", Signal::ABORT),
    ("ALRM", Signal::ALARM),
    ("BUS", Signal::BUS),
    ("CHLD", Signal::CHILD),
    ("CLD", Signal::CHILD),
    ("CONT", Signal::CONT),
    ("FPE", Signal::FPE),
    ("HUP", Signal::HUP),
    ("ILL", Signal::ILL),
    ("INT", Signal::INT),
    ("IO", Signal::IO),
    ("IOT", Signal::ABORT),
    ("KILL", Signal::KILL),
    ("PIPE", Signal::PIPE),
    ("POLL", Signal::IO),
    ("PROF", Signal::PROF),
    ("PWR", Signal::POWER),
    ("QUIT", Signal::QUIT),
    ("SEGV", Signal::SEGV),
    ("STKFLT", Signal::STKFLT),
    ("STOP", Signal::STOP),
    ("SYS", Signal::SYS),
    ("TERM", Signal::TERM),
    ("TRAP", Signal::TRAP),
    ("TSTP", Signal::TSTP),
    ("TTIN", Signal::TTIN),
    ("TTOU", Signal::TTOU),
    ("URG", Signal::URG),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    ("VTALRM", Signal::VTALARM),
    ("WINCH", Signal::WINCH),
    ("XCPU", Signal::XCPU),
    ("XFSZ", Signal::XFSZ),
];

/// The number of a signal: given as one, or by its name with or without `SIG`, in letters of either
/// case; real-time signals as `RTMIN+3` and `RTMAX-1`. None if there is no such signal.
pub(crate) fn number(text: &str) -> Option<i32> {
    let (first, last) = REAL_TIME;
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let offset = |text: &str, sign| match text.strip_prefix(sign) {
        None if text.is_empty() => Some(0),
        digits => digits?.parse::<u8>().ok().map(i32::from),
    };
    if let Some(more) = name.strip_prefix("RTMIN") {
        return offset(more, '+').map(|more| first + more).filter(|number| *number <= last);
    }
    if let Some(less) = name.strip_prefix("RTMAX") {
        return offset(less, '-').map(|less| last - less).filter(|number| *number >= first);
    }
    let named = NAMES.iter().find(|(it, _)| *it == name).map(|(_, signal)| signal.as_raw());
    named.or_else(|| text.parse().ok().filter(|number| (1..=last).contains(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only seven names were known. All others became SIGTERM, and systemd, whose images name
    /// SIGRTMIN+3, does not end by that.
    #[test]
    fn every_signal_has_a_number() {
        for (text, expected) in [
            ("SIGTERM", 15),
            ("TERM", 15),
            ("sigquit", 3),
            ("SIGABRT", 6),
            ("PWR", 30),
            ("SIGRTMIN", 34),
            ("SIGRTMIN+3", 37),
            ("RTMIN+30", 64),
            ("SIGRTMAX-1", 63),
            ("RTMAX", 64),
            ("9", 9),
            ("37", 37),
        ] {
            assert_eq!(number(text), Some(expected), "{text}");
        }
        for text in
            ["", "SIG", "SIGNOTHING", "0", "65", "-1", "SIG9", "RTMIN+31", "RTMIN-1", "RTMAX+1"]
        {
            assert_eq!(number(text), None, "{text}");
        }
        for text in ["RTMIN+", "RTMAX-31", "RTMIN+999999999999"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
