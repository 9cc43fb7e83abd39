use std::process::Stdio;

use super::*;

/// A script's output went to a file, to which the script wrote while a container ran: the container's next line
/// was written over the script's.
#[test]
fn others_write_to_the_same_file() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let (reader, mut pipe) = io::pipe().unwrap();
    let copied = copy(reader, file.as_file().try_clone().unwrap()).unwrap();
    let path = file.path().to_owned();
    let wait_for = |text: &str| {
        while std::fs::read_to_string(&path).unwrap() != text {
            std::thread::yield_now();
        }
    };
    pipe.write_all(b"inside\n").unwrap();
    wait_for("inside\n");
    file.write_all(b"outside\n").unwrap();
    pipe.write_all(b"inside again\n").unwrap();
    drop(pipe);
    copied.join().unwrap().unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "inside\noutside\ninside again\n");
}

/// A terminal that somebody else had made non-blocking ended the copying as soon as it was full.
#[test]
fn a_non_blocking_terminal_is_waited_for() {
    const BYTES: usize = 1 << 20;
    let (reader, mut pipe) = io::pipe().unwrap();
    let (mut terminal, output) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&output, true).unwrap();
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    let copied = copy(reader, output).unwrap();
    let written = thread(move || pipe.write_all(&[b'x'; BYTES])).unwrap();
    let mut shown = Vec::new();
    terminal.read_to_end(&mut shown).unwrap();
    assert_eq!(shown.len(), BYTES);
    copied.join().unwrap().unwrap();
    written.join().unwrap().unwrap();
}

/// Output of a detached container that could not be written was lost without a word.
#[test]
fn lost_output_is_an_error_and_leaves_a_mark() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("output");
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let mut command = Command::new("cat");
    let streams = Streams::File { path: path.clone(), bytes_max: 100 };
    let copies = streams.connect(&mut command).unwrap();
    let mut cat = command.stdin(Stdio::piped()).spawn().unwrap();
    // It has the other end of the pipe as well.
    drop(command);
    cat.stdin.take().unwrap().write_all(b"lost\n").unwrap();
    cat.wait().unwrap();
    assert_eq!(copies.finish(&Cancel::default()).unwrap_err().kind(), io::ErrorKind::StorageFull);

    let (reader, mut writer) = io::pipe().unwrap();
    let (full, to) = (append(&path).unwrap(), path.clone());
    let copied = thread(move || keep(reader, full, &to, 4)).unwrap();
    writer.write_all(b"lost\n").unwrap();
    while rustix::io::ioctl_fionread(&writer).unwrap() > 0 {
        std::thread::yield_now();
    }
    writer.write_all(b"kept\n").unwrap();
    drop(writer);
    copied.join().unwrap().unwrap();
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(kept.starts_with("\n[cofolio: output is missing here: No space left"), "{kept}");
    assert!(kept.ends_with("]\nkept\n"), "{kept}");
}

/// The directory is in memory on most machines, so output must be bounded.
#[test]
fn kept_output_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("output");
    let (reader, mut writer) = io::pipe().unwrap();
    let copied = {
        let (file, path) = (append(&path).unwrap(), path.clone());
        thread(move || keep(reader, file, &path, 100)).unwrap()
    };
    for number in 0..100_000 {
        writeln!(writer, "line {number}").unwrap();
    }
    writer.write_all(b"the end\n").unwrap();
    drop(writer);
    copied.join().unwrap().unwrap();
    let kept: u64 = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(std::fs::read_to_string(&path).unwrap().ends_with("the end\n"));
    // Of a million bytes two files are left, each of at most 100 bytes and one read.
    assert!(kept <= 2 * (100 + BUFFER_BYTES as u64), "{kept}");
}

/// Where the full file could not be put aside, everything more was written to it.
#[test]
fn output_is_bounded_although_no_file_can_be_had() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("output");
    std::fs::create_dir(dir.path().join("output.1")).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "echo first; head -c 1000000 /dev/zero"]);
    let streams = Streams::File { path: path.clone(), bytes_max: 100 };
    let copies = streams.connect(&mut command).unwrap();
    assert!(command.status().unwrap().success());
    // It has the other end of the pipe as well.
    drop(command);
    let error = copies.finish(&Cancel::default()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    // One read may hold more than the maximum.
    assert!(std::fs::metadata(path).unwrap().len() <= 64 << 10);
}
