//! Entry points of the targets of `fuzz/`, built with `--cfg fuzzing` only. They take any bytes and
//! panic if a promise is broken; `fuzz/fuzz_targets/` says which.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::{CAPABILITIES, ImageConfig, Options, generate, words};
use cofolio_guest::accounts::find_user;

fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("cofolio-fuzz-{}", std::process::id()));
        for path in ["proc", "dev", "sys", "run", "tmp", "data/d", "etc"] {
            fs::create_dir_all(dir.join("rootfs").join(path)).unwrap();
        }
        fs::write(dir.join("rootfs/etc/passwd"), "root:x:0:0::/:\napp:x:7:8::/:\n").unwrap();
        fs::write(dir.join("rootfs/etc/group"), "root:x:0:\nextra:x:9:app\n").unwrap();
        std::os::unix::fs::symlink("/data", dir.join("rootfs/link")).unwrap();
        dir
    })
}

/// An image's config, `/etc/passwd`, `/etc/group` and a user, a zero byte after each.
pub fn image(data: &[u8]) {
    let mut parts = data.splitn(4, |&byte| byte == 0);
    let mut next = || String::from_utf8_lossy(parts.next().unwrap_or_default());
    if let Ok(config) = ImageConfig::parse(&next()) {
        for readonly in [false, true] {
            run(&config, readonly);
        }
    }
    let (passwd, group, spec) = (next(), next(), next());
    user(&passwd, &group, &spec);
}

fn run(config: &ImageConfig, readonly: bool) {
    let options = Options { readonly, ..Options::default() };
    let rootfs = bundle().join("rootfs");
    let Ok(made) = generate(bundle(), &rootfs, config, &options, Path::new("/nowhere")) else {
        return;
    };
    let plain = |path: &str| {
        path.starts_with('/') && !path.contains('\0') && !path.split('/').any(|part| part == "..")
    };
    let process = &made["process"];
    assert!(!process["args"][0].as_str().unwrap().is_empty());
    assert!(plain(process["cwd"].as_str().unwrap()));
    assert!(process["noNewPrivileges"] == true && made["root"]["readonly"] == readonly);
    for set in ["bounding", "effective", "permitted"] {
        assert_eq!(process["capabilities"][set], serde_json::json!(words(CAPABILITIES)));
    }
    for mount in made["mounts"].as_array().unwrap() {
        assert!(plain(mount["destination"].as_str().unwrap()));
        if mount["type"] == "bind" {
            // Nothing of the host's but a directory that is the volume's.
            let source = mount["source"].as_str().unwrap();
            assert!(plain(source) && Path::new(source).starts_with(bundle().join("volumes")));
        }
    }
    serde_json::to_vec_pretty(&made).unwrap();
}

fn user(passwd: &str, group: &str, spec: &str) {
    let Ok(found) = find_user(passwd, group, spec) else { return };
    assert_eq!(found.additional_gids[0], found.gid);
    let mut all = found.additional_gids.clone();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), found.additional_gids.len());
    // Nobody becomes root by a name that is not root's.
    let name = spec.split(':').next().unwrap();
    if found.uid == 0 && !name.is_empty() && name.parse() != Ok(0u32) {
        let root = |line: &str| {
            let mut fields = line.split(':');
            fields.next() == Some(name) && fields.nth(1).is_some_and(|uid| uid.parse() == Ok(0u32))
        };
        assert!(passwd.lines().any(root), "{spec:?} is no root");
    }
}
