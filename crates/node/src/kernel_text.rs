//! Text files of the kernel, also those whose length a container decides.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::path::Path;

/// Bytes of a line that is read; a line of `/proc/PID/mountinfo` can have some megabytes.
const LINE_MAX: usize = 64 << 10;

/// Bytes that are read of one file. `/proc/PID/maps` has some 100 a mapping, mountinfo some 500 a
/// mount.
const TEXT_MAX: usize = 32 << 20;

/// What most files of `/proc` fit in.
const USUAL: usize = 4096;

/// Reads a file whole. Paths in it may be any bytes; what we parse is ASCII.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    // `fs::read` asks for the size first, which is 0, and then tries with a few bytes.
    let mut text = Vec::with_capacity(USUAL);
    File::open(path)?.take(u64::MAX).read_to_end(&mut text)?;
    Ok(match String::from_utf8(text) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    })
}

/// Calls `each` for every line of a file, in bounded memory and for a bounded length. Says whether
/// those were all lines.
pub(crate) fn for_each_line(path: &Path, each: impl FnMut(&[u8])) -> io::Result<bool> {
    for_each_line_of(BufReader::new(File::open(path)?), each)
}

/// [`for_each_line`] of a file that is read elsewhere.
pub(crate) fn for_each_line_of(
    text: impl BufRead,
    mut each: impl FnMut(&[u8]),
) -> io::Result<bool> {
    let mut text = text.take(TEXT_MAX as u64);
    let (mut line, mut is_whole) = (Vec::new(), true);
    loop {
        line.clear();
        if text.by_ref().take(LINE_MAX as u64).read_until(b'\n', &mut line)? == 0 {
            return Ok(is_whole && text.limit() > 0);
        }
        let is_ended = line.pop_if(|last| *last == b'\n').is_some();
        // The rest of the line, or of the file, is not read: what it says would be something else.
        if is_ended || line.len() < LINE_MAX && text.limit() > 0 {
            each(&line);
        } else {
            is_whole = false;
            text.skip_until(b'\n')?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A container can have a mapping or a mount whose line has megabytes, and any number of them.
    /// They were read whole, into the memory of the daemon.
    #[test]
    fn long_lines_and_long_files_are_not_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        let lines = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            let mut lines = Vec::new();
            let is_whole = for_each_line(&path, |line| lines.push(line.len())).unwrap();
            (lines, is_whole)
        };
        assert_eq!(lines(b""), (vec![], true));
        assert_eq!(lines(b"a\n\nbc"), (vec![1, 0, 2], true));
        let long = vec![b'x'; 3 * LINE_MAX];
        assert_eq!(lines(&[b"a\n", &long[..], b"\nbc\n"].concat()), (vec![1, 2], false));
        let fits = &long[..LINE_MAX - 1];
        assert_eq!(lines(&[fits, b"\n", fits].concat()), (vec![LINE_MAX - 1; 2], true));
        // The last line goes past the end of what is read.
        let text = [vec![b'y'; 99], vec![b'\n']].concat().repeat(TEXT_MAX / 100 + 1);
        let (lines, is_whole) = lines(&text);
        assert_eq!((lines.len(), is_whole), (TEXT_MAX / 100, false));
    }
}
