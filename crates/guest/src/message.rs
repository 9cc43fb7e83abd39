//! Messages between host and guest.
//!
//! ```text
//! u32   length of what follows, little endian, at most 1 MiB
//! JSON  the message
//! ```

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::Start;

/// Longest message, in bytes.
pub const MESSAGE_BYTES_MAX: u32 = 1 << 20;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// To the guest: what to do.
    Start(Box<Start>),
    /// From the guest: the process of its [`Start`] runs.
    Started,
    /// From the guest: that process has ended, with this status (128 and a signal's number).
    Ended(u8),
    /// From the guest: it could not start, and why.
    Failed(String),
    /// To the guest: send this signal to the process.
    Signal(i32),
    /// To the guest: rows and columns that its console has from now on.
    Size(u16, u16),
}

/// Why a message could not be read.
#[derive(Debug)]
pub enum MessageError {
    /// The other side has gone.
    Closed,
    /// It is none, and what follows is not known.
    Malformed(String),
    /// The channel failed.
    Io(io::Error),
}

impl std::fmt::Display for MessageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed => f.write_str("the channel was closed"),
            Self::Malformed(what) => write!(f, "malformed message: {what}"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for MessageError {}

impl Message {
    /// Its kind, for an error message. What else is in it may be long, and of somebody else's
    /// choice.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Start(_) => "start",
            Self::Started => "started",
            Self::Ended(_) => "ended",
            Self::Failed(_) => "failed",
            Self::Signal(_) => "signal",
            Self::Size(..) => "size",
        }
    }

    /// Writes it, in one piece.
    ///
    /// # Errors
    /// Those of the writer; `InvalidInput` if it is too long.
    pub fn write(&self, writer: &mut impl Write) -> io::Result<()> {
        let json = serde_json::to_vec(self)?;
        let len = u32::try_from(json.len()).ok().filter(|len| *len <= MESSAGE_BYTES_MAX);
        let len = len.ok_or(io::ErrorKind::InvalidInput)?;
        writer.write_all(&[&len.to_le_bytes()[..], &json].concat())
    }

    /// Reads the next one.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn read(reader: &mut impl Read) -> Result<Self, MessageError> {
        let mut len = [0; 4];
        read(reader, &mut len)?;
        let len = u32::from_le_bytes(len);
        if len > MESSAGE_BYTES_MAX {
            return Err(MessageError::Malformed(format!("it has {len} bytes")));
        }
        let mut json = vec![0; len as usize];
        read(reader, &mut json)?;
        serde_json::from_slice(&json).map_err(|error| MessageError::Malformed(error.to_string()))
    }
}

fn read(reader: &mut impl Read, bytes: &mut [u8]) -> Result<(), MessageError> {
    reader.read_exact(bytes).map_err(|error| match error.kind() {
        // Of a socket whose other side went without having read all.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => MessageError::Closed,
        _ => MessageError::Io(error),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let messages = [
            Message::Started,
            Message::Ended(3),
            Message::Failed("no device".to_owned()),
            Message::Signal(15),
            Message::Size(24, 80),
        ];
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| message.write(&mut bytes).unwrap());
        let mut reader = &bytes[..];
        for message in messages {
            assert_eq!(Message::read(&mut reader).unwrap(), message);
        }
        assert!(matches!(Message::read(&mut reader), Err(MessageError::Closed)));
    }

    #[test]
    fn a_guest_cannot_make_the_host_allocate() {
        let mut reader = &[0xff; 4][..];
        let error = Message::read(&mut reader).unwrap_err();
        assert!(matches!(error, MessageError::Malformed(_)), "{error}");
        let mut reader = &[2, 0, 0, 0, b'{', b'x'][..];
        assert!(matches!(Message::read(&mut reader), Err(MessageError::Malformed(_))));
        let long = Message::Failed("x".repeat(2 << 20));
        assert!(long.write(&mut Vec::new()).is_err());
    }
}
