//! The protocol of `vm exec`: frames about one process, on a virtio port of its own.
//!
//! ```text
//! u8    kind
//! u32   length of what follows, little endian, at most 128 KiB
//! bytes
//!
//! to the guest                          from the guest
//!  1 Start    Exec, as JSON: once        16 Started  the port's name: the first one
//!  2 Input    bytes; none is the end     17 Output   bytes
//!  3 Signal   u8, to its group           18 Errors   bytes
//!  4 Size     u16 rows, u16 columns      19 Taken    u32, bytes of input that the process has
//!                                        20 Ended    u8, its status: the last one
//!                                        21 Failed   text, instead of Started
//! ```
//!
//! The host sends at most [`INPUT_BYTES_MAX`] bytes of input that were not [`Frame::Taken`], so the
//! guest can always read its port, and signals never wait behind input. Output waits: the guest
//! reads no more of it until the port takes what it has.

use std::fmt;

use crate::Exec;

/// Longest content of a frame, in bytes.
pub const FRAME_BYTES_MAX: usize = 128 << 10;
/// Input that may be on its way to a process, in bytes.
pub const INPUT_BYTES_MAX: usize = 64 << 10;
/// Kind and length.
const HEADER_BYTES: usize = 5;

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the module says it")]
pub enum Frame {
    Start(Exec),
    Input(Vec<u8>),
    Signal(u8),
    Size(u16, u16),
    Started(String),
    Output(Vec<u8>),
    Errors(Vec<u8>),
    Taken(u32),
    Ended(u8),
    Failed(String),
}

/// Bytes that are no frame. The stream cannot be read any further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed frame: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

impl Frame {
    /// Its kind, for an error message. What else is in it may be long, and of somebody else's
    /// choice.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Start(_) => "start",
            Self::Input(_) => "input",
            Self::Signal(_) => "signal",
            Self::Size(..) => "size",
            Self::Started(_) => "started",
            Self::Output(_) => "output",
            Self::Errors(_) => "errors",
            Self::Taken(_) => "taken",
            Self::Ended(_) => "ended",
            Self::Failed(_) => "failed",
        }
    }

    /// Its bytes.
    ///
    /// # Errors
    /// [`Malformed`] if it is too long.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        let json;
        let (kind, content): (u8, &[u8]) = match self {
            Self::Start(exec) => {
                json = serde_json::to_vec(exec).map_err(|error| Malformed(error.to_string()))?;
                (1, &json)
            }
            Self::Input(bytes) => (2, bytes),
            Self::Signal(number) => (3, &[*number]),
            Self::Size(rows, columns) => (4, &[rows.to_le_bytes(), columns.to_le_bytes()].concat()),
            Self::Started(port) => (16, port.as_bytes()),
            Self::Output(bytes) => (17, bytes),
            Self::Errors(bytes) => (18, bytes),
            Self::Taken(bytes) => (19, &bytes.to_le_bytes()),
            Self::Ended(status) => (20, &[*status]),
            Self::Failed(why) => (21, why.as_bytes()),
        };
        let len = u32::try_from(content.len()).ok().filter(|_| content.len() <= FRAME_BYTES_MAX);
        let len = len.ok_or_else(|| Malformed(format!("it has {} bytes", content.len())))?;
        Ok([&[kind], &len.to_le_bytes()[..], content].concat())
    }

    fn decode(kind: u8, content: &[u8]) -> Result<Self, Malformed> {
        let text = || String::from_utf8_lossy(content).into_owned();
        Ok(match (kind, content) {
            (1, _) => {
                let exec = serde_json::from_slice(content);
                Self::Start(exec.map_err(|error| Malformed(error.to_string()))?)
            }
            (2, _) => Self::Input(content.to_vec()),
            (3, &[number]) => Self::Signal(number),
            (4, &[a, b, c, d]) => {
                Self::Size(u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
            }
            (16, _) => Self::Started(text()),
            (17, _) => Self::Output(content.to_vec()),
            (18, _) => Self::Errors(content.to_vec()),
            (19, &[a, b, c, d]) => Self::Taken(u32::from_le_bytes([a, b, c, d])),
            (20, &[status]) => Self::Ended(status),
            (21, _) => Self::Failed(text()),
            _ => return Err(Malformed(format!("kind {kind} with {} bytes", content.len()))),
        })
    }
}

/// Frames out of a stream that comes in pieces. It holds one frame and the last piece at most, if
/// all frames are taken after each piece.
#[derive(Debug, Default)]
pub struct Decoder(Vec<u8>);

impl Decoder {
    /// The next piece.
    pub fn push(&mut self, piece: &[u8]) {
        self.0.extend_from_slice(piece);
    }

    /// The next frame, if all of it is there.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn take(&mut self) -> Result<Option<Frame>, Malformed> {
        let Some((&[kind, a, b, c, d], rest)) = self.0.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len > FRAME_BYTES_MAX {
            return Err(Malformed(format!("it has {len} bytes")));
        }
        let Some(content) = rest.get(..len) else { return Ok(None) };
        let frame = Frame::decode(kind, content)?;
        self.0.drain(..HEADER_BYTES + len);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use proptest::prelude::*;

    use super::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..300);
        prop_oneof![
            ("[ -~é]{0,9}", any::<Option<(u16, u16)>>()).prop_map(|(text, terminal)| {
                let command = vec![text.clone(), String::new()];
                Frame::Start(Exec { command, user: Some(text), terminal, ..Exec::default() })
            }),
            bytes().prop_map(Frame::Input),
            any::<u8>().prop_map(Frame::Signal),
            any::<(u16, u16)>().prop_map(|(rows, columns)| Frame::Size(rows, columns)),
            "[ -~é]{0,9}".prop_map(Frame::Started),
            bytes().prop_map(Frame::Output),
            bytes().prop_map(Frame::Errors),
            any::<u32>().prop_map(Frame::Taken),
            any::<u8>().prop_map(Frame::Ended),
            "[ -~é]{0,9}".prop_map(Frame::Failed),
        ]
    }

    proptest! {
        #[test]
        fn frames_are_the_same_however_they_are_cut(
            frames in prop::collection::vec(frame(), 1..8),
            piece in 1..200_usize,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|it| it.encode().unwrap()).collect();
            let (mut decoder, mut found) = (Decoder::default(), Vec::new());
            for piece in bytes.chunks(piece) {
                decoder.push(piece);
                while let Some(frame) = decoder.take().unwrap() {
                    found.push(frame);
                }
            }
            prop_assert_eq!(found, frames);
        }

        /// A guest may be compromised.
        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(frame)) = decoder.take() {
                // Text that was not UTF-8 became longer.
                let _ = frame.encode();
            }
        }
    }

    #[test]
    fn a_frame_has_a_limit() {
        let mut decoder = Decoder::default();
        decoder.push(&[17, 1, 0, 2, 0]);
        assert!(decoder.take().is_err());
        assert!(Frame::Output(vec![0; FRAME_BYTES_MAX]).encode().is_ok());
        assert!(Frame::Output(vec![0; FRAME_BYTES_MAX + 1]).encode().is_err());
    }
}
