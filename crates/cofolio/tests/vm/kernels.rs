//! `cofolio vm run` with each kernel that its help names.

use super::common::{program, skip};
use super::{host, kernel};

/// Debian's newest kernel, and those of its stable releases: made for clouds, and for all machines.
const FLAVOURS: [&str; 6] = [
    "cloud-amd64",
    "amd64",
    "stable-cloud-amd64",
    "stable-amd64",
    "oldstable-cloud-amd64",
    "oldstable-amd64",
];

#[test]
fn each_kernel_boots_and_maps_the_image() {
    let test = "each_kernel_boots_and_maps_the_image";
    let Some(mut host) = host(test) else { return };
    let disk = format!("{}:64M", host.text("disk"));
    for flavour in FLAVOURS {
        let Some(kernel) = kernel(test, flavour) else { continue };
        host.kernel = kernel.to_str().unwrap().to_owned();
        // The guest gives up if the image is mapped without DAX.
        let script = "md5sum /bin/busybox >/dev/null && echo changed >/etc/passwd && uname -r";
        let booted = host.sh(&[], script);
        // The output has no messages of the kernel, not even at the end.
        assert_eq!(booted.ok().lines().count(), 1, "{flavour}: {}", booted.stdout);
        println!("{flavour}: {}", booted.stdout.trim());
        if program("mkfs.ext4").is_none() {
            skip(test, "no mkfs.ext4");
            continue;
        }
        let kept = host.sh(&["--disk", &disk], "echo >>/count; wc -l </count");
        println!("{flavour}: {} on the disk", kept.ok().trim());
    }
    host.assert_clean();
}
