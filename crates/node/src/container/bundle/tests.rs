use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use tempfile::NamedTempFile;

use super::*;
use cofolio_guest::accounts::User;

fn write(
    dir: &Path,
    rootfs: &Path,
    image: &ImageConfig,
    options: &Options,
    host: &Path,
) -> Result<Value> {
    Bundle::open(dir, true)?.write(Some(rootfs), image, options, host)
}

fn check(dir: &Path, replace: bool) -> Result<()> {
    Bundle::open(dir, replace).map(drop)
}

/// A root filesystem with the account files of a Debian-like image.
fn rootfs() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("etc")).unwrap();
    fs::write(
        dir.path().join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\n\
         broken line\n\
         redis:x:999:1000::/data:/bin/sh\n\
         minus:x:-1:5::/:\n",
    )
    .unwrap();
    fs::write(
        dir.path().join("etc/group"),
        "root:x:0:\naudio:x:29:redis,other\nvideo:x:44:other, redis\nredis:x:1000:\nbin:x:1:root\n",
    )
    .unwrap();
    dir
}

fn user(uid: u32, gid: u32, additional: &[u32]) -> User {
    User { uid, gid, additional_gids: additional.to_vec() }
}

#[test]
fn users_by_name_number_and_group() {
    let root = rootfs();
    let resolve = |spec: &str| resolve_user(&Rootfs::open(root.path()).unwrap(), spec);
    assert_eq!(resolve("").unwrap(), user(0, 0, &[0, 1]));
    assert_eq!(resolve("redis").unwrap(), user(999, 1000, &[1000, 29, 44]));
    assert_eq!(resolve("999").unwrap(), user(999, 1000, &[1000, 29, 44]));
    assert_eq!(resolve("redis:audio").unwrap(), user(999, 29, &[29]));
    assert_eq!(resolve("redis:7").unwrap(), user(999, 7, &[7]));
    assert_eq!(resolve("4242").unwrap(), user(4242, 0, &[0]));
    assert_eq!(resolve("4242:4243").unwrap(), user(4242, 4243, &[4243]));
    assert_eq!(resolve(":audio").unwrap(), user(0, 29, &[29]));
    // An account whose numbers do not fit is no account.
    assert!(matches!(
        resolve("minus"),
        Err(BundleError::Account(AccountError::Unknown { kind: "user", .. }))
    ));
    let error = resolve("nobody").unwrap_err().to_string();
    assert_eq!(error, "user `nobody` is not in the image's /etc/passwd");
    let error = resolve("redis:wheel").unwrap_err().to_string();
    assert_eq!(error, "group `wheel` is not in the image's /etc/group");
}

mod linear {
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/linear.rs"));
}

/// Each group was looked for in the list of those before it. An `/etc/group` of 16 MiB, as large as one may be, has a
/// million groups: `cofolio bundle` of such an image took 47 seconds of a processor.
#[test]
fn a_user_of_very_many_groups() {
    let root = rootfs();
    linear::assert_linear(200_000, |count| {
        let groups: String = (0..count).map(|gid| format!("g:x:{gid}:redis\n")).collect();
        fs::write(root.path().join("etc/group"), groups).unwrap();
        let found = resolve_user(&Rootfs::open(root.path()).unwrap(), "redis").unwrap();
        assert_eq!(found.additional_gids.len(), count);
        assert_eq!(found.additional_gids[..3], [1000, 0, 1]);
    });
}

/// An image whose /etc/passwd is a link to the host's must not see the host's accounts.
#[test]
fn account_files_cannot_lead_outside() {
    let root = tempfile::tempdir().unwrap();
    let host = tempfile::tempdir().unwrap();
    fs::write(host.path().join("passwd"), "evil:x:0:0::/:\n").unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    let link = root.path().join("etc/passwd");
    symlink(host.path().join("passwd"), &link).unwrap();
    assert!(matches!(
        resolve_user(&Rootfs::open(root.path()).unwrap(), "evil"),
        Err(BundleError::Account(AccountError::Unknown { .. }))
    ));

    // A link that stays inside is followed, absolute ones from the image's root.
    fs::remove_file(&link).unwrap();
    fs::write(root.path().join("accounts"), "app:x:7:8::/:\n").unwrap();
    symlink("/accounts", &link).unwrap();
    assert_eq!(resolve_user(&Rootfs::open(root.path()).unwrap(), "app").unwrap(), user(7, 8, &[8]));
}

fn parse(text: &str) -> ImageConfig {
    ImageConfig::parse(text).unwrap()
}

const REDIS: &str = r#"{
  "architecture": "amd64", "os": "linux", "created": "2024-01-09T01:02:03Z",
  "config": {
    "Env": ["PATH=/usr/local/bin:/bin", "VERSION=7.0.15"], "User": "redis",
    "Entrypoint": ["entry.sh"], "Cmd": ["redis-server"], "WorkingDir": "/data",
    "Volumes": {"/data": {}}, "ExposedPorts": {"6379/tcp": {}}, "StopSignal": "SIGQUIT",
    "Labels": {"maintainer": "someone", "org.opencontainers.image.os": "label wins"}
  },
  "rootfs": {"type": "layers", "diff_ids": []}
}"#;

#[test]
fn command_lines_combine_as_docker_run_does() {
    let image = parse(REDIS);
    let with = |options: Options| command(&image, &options).unwrap().join(" ");
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(with(Options::default()), "entry.sh redis-server");
    assert_eq!(with(Options { args: words("a b"), ..Options::default() }), "entry.sh a b");
    let entrypoint = Some(words("/bin/sh"));
    assert_eq!(with(Options { entrypoint, ..Options::default() }), "/bin/sh");
    let (entrypoint, args) = (Some(Vec::new()), words("id -u"));
    assert_eq!(with(Options { entrypoint, args, ..Options::default() }), "id -u");

    let nothing = parse(r#"{"os": "linux", "config": {"Cmd": null, "Env": null}}"#);
    assert!(matches!(command(&nothing, &Options::default()), Err(BundleError::NoCommand)));
    let empty_word = parse(r#"{"config": {"Cmd": [""]}}"#);
    assert!(matches!(command(&empty_word, &Options::default()), Err(BundleError::NoCommand)));
}

/// Labels of an image were annotations, and crun takes orders from these: with
/// `run.oci.seccomp.plugins=/proc/self/cwd/rootfs/evil.so` it loaded code of the image as root of the host.
#[test]
fn labels_of_an_image_are_no_orders_for_a_runtime() {
    let orders = [
        "run.oci.seccomp.plugins",
        "run.oci.seccomp_bpf_data",
        "run.oci.keep_original_groups",
        "org.criu.config",
        "org.systemd.property.ExecStopPost",
        "io.kubernetes.cri.container-type",
        "org.opencontainers.runtime",
        "maintainer",
    ];
    let described = "org.opencontainers.image.title";
    let labels: BTreeMap<_, _> =
        orders.into_iter().chain([described]).map(|name| (name, "evil")).collect();
    let config = json!({"Cmd": ["x"], "Labels": labels, "StopSignal": "--regex"});
    let image = parse(&json!({"config": config}).to_string());
    assert_eq!(image.stop_signal(), "SIGTERM");
    let other = |signal: &str| json!({"config": {"StopSignal": signal}}).to_string();
    for signal in ["SIGQUIT", "9", "SIGRTMIN+3"] {
        assert_eq!(parse(&other(signal)).stop_signal(), signal);
    }
    let (root, bundle) = (rootfs(), tempfile::tempdir().unwrap());
    let host = tempfile::tempdir().unwrap();
    let config =
        write(bundle.path(), root.path(), &image, &Options::default(), host.path()).unwrap();
    let annotations = config["annotations"].as_object().unwrap();
    assert_eq!(annotations.get(described), Some(&json!("evil")));
    for name in orders {
        assert_eq!(annotations.get(name), None, "{name}");
    }
}

#[test]
fn config_json_of_a_writable_bundle() {
    let root = rootfs();
    let bundle = tempfile::tempdir().unwrap();
    let host = tempfile::tempdir().unwrap();
    let options = Options {
        env: vec!["VERSION=8".into(), "EXTRA=1".into()],
        hostname: Some("box".into()),
        ..Options::default()
    };
    let config = write(bundle.path(), root.path(), &parse(REDIS), &options, host.path()).unwrap();
    let written: Value =
        serde_json::from_slice(&fs::read(bundle.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(config, written);

    let process = &config["process"];
    assert_eq!(process["args"], json!(["entry.sh", "redis-server"]));
    assert_eq!(process["env"], json!(["PATH=/usr/local/bin:/bin", "VERSION=8", "EXTRA=1"]));
    assert_eq!(process["cwd"], "/data");
    assert_eq!(process["user"], json!({"uid": 999, "gid": 1000, "additionalGids": [1000, 29, 44]}));
    assert_eq!(config["root"]["readonly"], false);
    assert_eq!(config["hostname"], "box");
    let annotations = &config["annotations"];
    assert_eq!(annotations["org.opencontainers.image.stopSignal"], "SIGQUIT");
    assert_eq!(annotations["org.opencontainers.image.exposedPorts"], "6379/tcp");
    assert_eq!(annotations["org.opencontainers.image.os"], "label wins");
    // Host without the unified hierarchy: no cgroup namespace.
    let namespaces = config["linux"]["namespaces"].as_array().unwrap();
    assert!(!namespaces.contains(&json!({"type": "cgroup"})));
    assert!(namespaces.contains(&json!({"type": "network"})));

    let unified = host.path().join("sys/fs/cgroup");
    fs::create_dir_all(&unified).unwrap();
    fs::write(unified.join("cgroup.controllers"), "memory\n").unwrap();
    let config = write(bundle.path(), root.path(), &parse(REDIS), &options, host.path()).unwrap();
    let namespaces = config["linux"]["namespaces"].as_array().unwrap();
    assert!(namespaces.contains(&json!({"type": "cgroup"})));
}

#[test]
fn a_read_only_root_gets_scratch_and_volumes() {
    let root = rootfs();
    let bundle = tempfile::tempdir().unwrap();
    let options = Options { readonly: true, ..Options::default() };
    let make = || write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/"));
    assert_eq!(
        make().unwrap_err().to_string(),
        "mount point /proc does not exist, and its parent is read-only"
    );
    for name in ["proc", "dev", "sys", "tmp", "data"] {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    let config = make().unwrap();
    let mounts = config["mounts"].as_array().unwrap();
    let at = |path: &str| mounts.iter().find(|mount| mount["destination"] == path);
    assert_eq!(at("/tmp").unwrap()["type"], "tmpfs");
    assert!(at("/run").is_none(), "the image has no /run");
    let data = fs::canonicalize(bundle.path()).unwrap().join("volumes/data");
    assert_eq!(at("/data").unwrap()["source"], data.to_str().unwrap());
    assert!(data.is_dir());
    // A process that was killed left a volume without its mode, and the next one took it as it was. One
    // that was killed before left a directory aside, which the next process with its number refused.
    fs::remove_dir(&data).unwrap();
    fs::create_dir(data.with_file_name(format!("%new-{}", std::process::id()))).unwrap();
    make().unwrap();
    assert_eq!(data.metadata().unwrap().permissions().mode() & 0o7777, 0o755);
    assert_eq!(fs::read_dir(data.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn what_cannot_run_is_refused() {
    let root = rootfs();
    let bundle = tempfile::tempdir().unwrap();
    let make = |text: &str| {
        let image = ImageConfig::parse(text)?;
        write(bundle.path(), root.path(), &image, &Options::default(), Path::new("/"))
    };
    assert!(matches!(
        make(r#"{"os": "windows", "config": {"Cmd": ["x"]}}"#),
        Err(BundleError::OperatingSystem(_))
    ));
    assert!(matches!(
        make(r#"{"config": {"Cmd": ["x"], "WorkingDir": "../../etc"}}"#),
        Err(BundleError::BadPath { .. })
    ));
    assert!(matches!(make(r#""text""#), Err(BundleError::Config(_))));
    assert!(!bundle.path().join("config.json").exists());
}

/// `bundle` wrote a new `config.json` over one that somebody had edited.
#[test]
fn an_edited_config_stays() {
    let bundle = tempfile::tempdir().unwrap();
    let config = bundle.path().join("config.json");
    check(bundle.path(), false).unwrap();
    fs::write(&config, "edited").unwrap();
    let error = check(bundle.path(), false).unwrap_err().to_string();
    assert_eq!(error, format!("{} exists", config.display()));
    check(bundle.path(), true).unwrap();
    assert_eq!(fs::read(&config).unwrap(), b"edited");
}

/// Root mounted the image wherever `DIR/rootfs` led to, and wrote `DIR/config.json.new` through a link, in
/// a directory of a user who could make these links.
#[test]
fn only_its_owner_can_redirect_a_bundle() {
    let bundle = tempfile::tempdir().unwrap();
    let (dir, elsewhere) = (bundle.path(), tempfile::tempdir().unwrap());
    let rootfs = dir.join("rootfs");
    symlink(elsewhere.path(), &rootfs).unwrap();
    let refused = || {
        let error = check(dir, true).unwrap_err();
        assert!(matches!(error, BundleError::Unsafe { .. }), "{error}");
    };
    refused();
    fs::remove_file(&rootfs).unwrap();
    fs::write(&rootfs, "").unwrap();
    refused();
    fs::remove_file(&rootfs).unwrap();
    fs::create_dir(&rootfs).unwrap();
    check(dir, true).unwrap();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o770)).unwrap();
    refused();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap();

    // Nor may it lead volumes elsewhere: with `volumes -> /` a VOLUME /etc was the host's.
    let (root, volumes) = (rootfs_of_redis(), fs::canonicalize(dir).unwrap().join("volumes"));
    let options = Options { readonly: true, ..Options::default() };
    let write_it = || write(dir, root.path(), &parse(REDIS), &options, Path::new("/"));
    symlink(elsewhere.path(), &volumes).unwrap();
    assert!(matches!(write_it().unwrap_err(), BundleError::Unsafe { path, .. } if path == volumes));
    fs::remove_file(&volumes).unwrap();
    fs::create_dir(&volumes).unwrap();
    symlink(elsewhere.path(), volumes.join("data")).unwrap();
    assert!(matches!(write_it().unwrap_err(), BundleError::Unsafe { .. }));
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    fs::remove_dir_all(&volumes).unwrap();

    let link = dir.join("config.json.new");
    let other = elsewhere.path().join("other");
    fs::write(&other, "as it was").unwrap();
    symlink(&other, link).unwrap();
    write(dir, root.path(), &parse(REDIS), &Options::default(), Path::new("/")).unwrap();
    assert_eq!(fs::read(&other).unwrap(), b"as it was");
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(dir, Some(1000), None).unwrap();
        refused();
    }
}

/// Who can write to the directory above a bundle could put another one in its place, or a link to one of
/// root's, between the check and the writing.
#[test]
fn a_bundle_that_is_moved_is_written_where_it_is() {
    let (dir, root) = (tempfile::tempdir().unwrap(), rootfs_of_redis());
    let [at, moved, elsewhere] = ["at", "moved", "elsewhere"].map(|name| dir.path().join(name));
    [&at, &elsewhere].iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let bundle = Bundle::open(&at, false).unwrap();
    fs::rename(&at, &moved).unwrap();
    symlink(&elsewhere, &at).unwrap();
    let options = Options { readonly: true, ..Options::default() };
    bundle.write(Some(root.path()), &parse(REDIS), &options, Path::new("/")).unwrap();
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    assert!(moved.join("config.json").exists() && moved.join("volumes/data").is_dir());
    // Its own root filesystem has to be a mount.
    fs::create_dir(moved.join("rootfs")).unwrap();
    let error = bundle.write(None, &parse(REDIS), &options, Path::new("/")).unwrap_err();
    assert!(matches!(error, BundleError::Unsafe { .. }), "{error}");
}

fn rootfs_of_redis() -> tempfile::TempDir {
    let root = rootfs();
    for name in ["proc", "dev", "sys", "tmp", "data", "data/sub"] {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    root
}

/// A link of an image led the tmpfs of `/run` into /proc, and the runtime copied into it what it may read there and
/// the container may not. A volume was mounted there, too. Later a link by way of a name that is not UTF-8 still led
/// there, and one to `/` led a volume over the whole root.
#[test]
fn no_link_of_an_image_leads_a_mount_to_those_of_the_container() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    let options = Options { readonly: true, ..Options::default() };
    let make = |image: &str, options: &Options| {
        write(bundle.path(), root.path(), &parse(image), options, Path::new("/"))
    };
    let destinations = |config: &Value| -> Vec<String> {
        let mounts = config["mounts"].as_array().unwrap().iter();
        mounts.map(|mount| mount["destination"].as_str().unwrap().to_owned()).collect()
    };
    fs::create_dir(root.path().join("proc/tty")).unwrap();
    let link_name = |to: &[u8], name: &[u8]| {
        symlink(OsStr::from_bytes(to), root.path().join(OsStr::from_bytes(name))).unwrap();
    };
    let link = |to: &str, name: &str| link_name(to.as_bytes(), name.as_bytes());
    link("/proc/tty", "run");
    link("tmp", "var");
    let made = destinations(&make(r#"{"config": {"Cmd": ["x"]}}"#, &options).unwrap());
    assert!(made.contains(&"/tmp".to_owned()), "{made:?}");
    assert!(!made.iter().any(|it| it == "/run" || it == "/var/tmp"), "{made:?}");
    fs::remove_file(root.path().join("run")).unwrap();
    link("/data", "run");
    let made = destinations(&make(r#"{"config": {"Cmd": ["x"]}}"#, &options).unwrap());
    assert!(made.contains(&"/data".to_owned()), "{made:?}");
    fs::remove_file(root.path().join("run")).unwrap();

    link("/proc/tty", "led");
    link("proc", "above");
    link("/nowhere", "dangling");
    link("data", "plain");
    link("/led/../tty/x/..", "winding");
    link("loop", "loop");
    link(".", "root");
    link_name(b"\xff", b"bytes");
    link_name(b"/proc", b"\xff");
    link_name(b"\xfe", b"unsayable");
    fs::create_dir(root.path().join(OsStr::from_bytes(b"\xfe"))).unwrap();
    let long = "/x".repeat(2100);
    // Where it is mounted as a volume of the image, and as one that the caller names.
    for (path, volume, bind) in [
        ("/led", "nowhere", "refused"),
        ("/above/tty", "nowhere", "refused"),
        ("/winding", "nowhere", "refused"),
        ("/bytes", "nowhere", "refused"),
        ("/root", "nowhere", "refused"),
        ("/.", "nowhere", "refused"),
        // The caller's own choice.
        ("/proc/tty", "nowhere", "/proc/tty"),
        ("/dev", "nowhere", "/dev"),
        ("/dangling/x", "missing", "/nowhere/x"),
        ("/plain", "/data", "/data"),
        ("/loop", "failed", "failed"),
        ("/unsayable", "failed", "failed"),
        (&long, "failed", "failed"),
    ] {
        let outcome = |made: Result<Value>, source: &Path| match made {
            Ok(made) => place(&made, source).unwrap_or_else(|| "nowhere".to_owned()),
            Err(BundleError::LinkedTarget(_)) => "refused".to_owned(),
            Err(BundleError::MissingMountPoint(_)) => "missing".to_owned(),
            Err(BundleError::Io(_)) => "failed".to_owned(),
            Err(error) => panic!("{path}: {error}"),
        };
        let image = json!({"config": {"Cmd": ["x"], "Volumes": {path: {}}}}).to_string();
        let volumes = fs::canonicalize(bundle.path()).unwrap().join("volumes");
        let source = volumes.join(path.trim_start_matches('/').replace('/', "%2F"));
        assert_eq!(outcome(make(&image, &options), &source), volume, "{path}");
        let source = PathBuf::from("/srv");
        let bind_to = Bind { source: source.clone(), target: path.to_owned(), readonly: false };
        let writable = Options { binds: vec![bind_to], ..Options::default() };
        assert_eq!(
            outcome(make(r#"{"config": {"Cmd": ["x"]}}"#, &writable), &source),
            bind,
            "{path}"
        );
    }
    link("/proc/tty", "etc/hosts");
    let network = Options { host_network: true, ..Options::default() };
    let made = destinations(&make(r#"{"config": {"Cmd": ["x"]}}"#, &network).unwrap());
    assert!(!made.contains(&"/etc/hosts".to_owned()), "{made:?}");
    fs::rename(root.path().join("sys"), root.path().join("other")).unwrap();
    link("other", "sys");
    for options in [&options, &Options::default()] {
        let error = make(r#"{"config": {"Cmd": ["x"]}}"#, options).unwrap_err();
        assert!(matches!(error, BundleError::LinkedMountPoint("/sys")), "{error}");
    }
}

/// To setresuid, 4294967295 is "leave it as it is": `--user 4294967295` ran as root.
#[test]
fn no_user_is_root_by_the_number_that_means_none() {
    let root = rootfs();
    let text = "none:x:4294967295:5::/:\n4294967295:x:0:0::/:\n1000:x:0:0::/:\n";
    fs::write(root.path().join("etc/passwd"), text).unwrap();
    fs::write(root.path().join("etc/group"), "1000:x:0:\n").unwrap();
    let root = Rootfs::open(root.path()).unwrap();
    // Nor by a number that an account has as its name.
    assert_eq!(resolve_user(&root, "1000").unwrap(), user(1000, 0, &[0]));
    assert_eq!(resolve_user(&root, "1000:1000").unwrap(), user(1000, 1000, &[1000]));
    for spec in ["4294967295", "4294967296", "none", "0:4294967295"] {
        let found = resolve_user(&root, spec);
        assert!(
            matches!(found, Err(BundleError::Account(AccountError::NoId(_)))),
            "{spec} {found:?}"
        );
    }
}

/// To see that `/etc/passwd` of an image is a device, it was opened: its driver heard of it, outside of any
/// container.
#[test]
fn no_device_of_an_image_is_opened() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP no_device_of_an_image_is_opened: needs root");
    }
    let root = rootfs();
    let passwd = root.path().join("etc/passwd");
    fs::remove_file(&passwd).unwrap();
    // A number that no driver has: to open it fails otherwise than to look at it.
    let device = rustix::fs::makedev(4095, 1);
    let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &passwd, kind, mode, device).unwrap();
    let error = resolve_user(&Rootfs::open(root.path()).unwrap(), "0").unwrap_err();
    let said = cofolio_store::with_causes(&error);
    assert!(said.contains("not a regular file"), "{said}");
}

/// A directory of the host below a writable directory of a read-only root had to be in the image.
#[test]
fn a_mount_point_can_be_made_in_a_writable_directory() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    let make = |target: &str| {
        let source = PathBuf::from("/srv");
        let options = Options {
            readonly: true,
            writable_dirs: vec!["/etc".into()],
            binds: vec![Bind { source, target: target.to_owned(), readonly: false }],
            ..Options::default()
        };
        write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/"))
    };
    // Or in a volume, which a read-only root was said to lack.
    for made in ["/etc/made/here", "/data/made"] {
        make(made).unwrap();
    }
    for missing in ["/made", "/etcetera"] {
        let error = make(missing).unwrap_err();
        assert!(matches!(error, BundleError::MissingMountPoint(_)), "{missing}: {error}");
    }
    assert!(matches!(make("/etc/../made").unwrap_err(), BundleError::BadPath { .. }));
}

/// A container writes to its volume `/data`. When it left a link `sub` there, the next bundle with a volume
/// `/data/sub` in the same directory followed that: the next container got a directory of the host's. Later the runtime
/// followed it to where the volume is mounted in the container.
#[test]
fn a_volume_is_not_looked_up_inside_another() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    let image = parse(
        r#"{"config": {"Cmd": ["x"], "Volumes": {"/data": {}, "/data/sub": {}, "/data/": {}}}}"#,
    );
    let options = Options { readonly: true, ..Options::default() };
    let make = || write(bundle.path(), root.path(), &image, &options, Path::new("/")).unwrap();
    let volumes = fs::canonicalize(bundle.path()).unwrap().join("volumes");
    let sub = volumes.join("data%2Fsub");
    assert_eq!(place(&make(), &sub).unwrap(), "/data/sub");
    assert!(sub.is_dir());
    let link = volumes.join("data/sub");
    for (target, destination) in [("/tmp", Some("/tmp")), ("../proc/bus", None)] {
        symlink(target, &link).unwrap();
        assert_eq!(place(&make(), &sub).as_deref(), destination);
        fs::remove_file(&link).unwrap();
    }
    // The caller's mounts are looked up likewise.
    symlink("/sys/x", &link).unwrap();
    let source = PathBuf::from("/srv");
    let below = Bind { source, target: "/data/sub/below".to_owned(), readonly: false };
    let volume = Bind { source: volumes.join("data"), target: "/data".to_owned(), readonly: false };
    let options = Options { binds: vec![volume, below], ..Options::default() };
    let error = write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/"));
    assert!(matches!(error.unwrap_err(), BundleError::LinkedTarget(_)));
}

/// Where something is mounted in a container.
fn place(config: &Value, source: &Path) -> Option<String> {
    let mut mounts = config["mounts"].as_array().unwrap().iter();
    let it = mounts.find(|mount| mount["source"].as_str().map(Path::new) == Some(source))?;
    Some(it["destination"].as_str().unwrap().to_owned())
}

/// A directory of the host came to lie where a link of the image leads that the container does not see, because a volume,
/// another such directory or `/dev` is mounted over it: what the container wrote was lost.
#[test]
fn links_that_a_mount_hides_lead_nowhere() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    symlink("/tmp", root.path().join("data/link")).unwrap();
    symlink("/etc", root.path().join("dev/link")).unwrap();
    let (above, below) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bind = |source: &tempfile::TempDir, target: &str| {
        let source = fs::canonicalize(source.path()).unwrap();
        Bind { source, target: target.to_owned(), readonly: false }
    };
    let made = |readonly: bool, binds: Vec<Bind>| {
        let options = Options { readonly, binds, ..Options::default() };
        write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/")).unwrap()
    };
    let below_is = |made: Value| place(&made, &fs::canonicalize(below.path()).unwrap()).unwrap();
    // REDIS has a volume `/data`.
    assert_eq!(below_is(made(true, vec![bind(&below, "/data/link")])), "/data/link");
    assert_eq!(below_is(made(false, vec![bind(&below, "/data/link")])), "/tmp");
    // The one below came first, and the other one was mounted over it.
    let binds = vec![bind(&below, "/data/link"), bind(&above, "/data")];
    let config = made(false, binds.clone());
    let last = config["mounts"].as_array().unwrap().last().unwrap();
    assert_eq!(last["destination"], "/data/link");
    assert_eq!(below_is(made(true, binds)), "/data/link");
    for readonly in [false, true] {
        assert_eq!(below_is(made(readonly, vec![bind(&below, "/dev/link")])), "/dev/link");
    }
    // One that lies in the other by way of a link.
    fs::create_dir_all(root.path().join("usr/deep/er")).unwrap();
    symlink("usr/deep/er", root.path().join("short")).unwrap();
    for target in ["/short", "/short/x/y"] {
        for turn in [0, 1] {
            let mut binds = vec![bind(&below, target), bind(&above, "/usr/deep")];
            binds.rotate_left(turn);
            let made = made(false, binds);
            let last = made["mounts"].as_array().unwrap().last().unwrap();
            assert!(last["destination"].as_str().unwrap().starts_with("/usr/deep/er"), "{target}");
        }
    }
    // Or by way of one in what is mounted, whichever is named first.
    let inside = tempfile::tempdir().unwrap();
    symlink("/mnt/store", above.path().join("data")).unwrap();
    for turn in 0..3 {
        let all =
            [bind(&above, "/data"), bind(&below, "/data/data"), bind(&inside, "/mnt/store/x")];
        let mut binds = all.to_vec();
        binds.rotate_left(turn);
        let made = made(false, binds);
        let last = made["mounts"].as_array().unwrap().last().unwrap();
        assert_eq!(last["destination"], "/mnt/store/x", "{turn}");
        assert_eq!(below_is(made.clone()), "/mnt/store");
    }
    let binds = vec![bind(&above, "/mnt"), bind(&below, "/mnt/.")];
    let options = Options { binds, ..Options::default() };
    let error = write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/"));
    assert!(matches!(error.unwrap_err(), BundleError::Hides { .. }));
    // A container left a link in what is mounted below /dev.
    symlink("/proc", above.path().join("l")).unwrap();
    let binds = vec![bind(&above, "/dev/d"), bind(&below, "/dev/d/l")];
    let options = Options { binds, ..Options::default() };
    let error = write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/"));
    assert!(matches!(error.unwrap_err(), BundleError::LinkedTarget(_)));
}

/// Changes that were to be kept went to the tmpfs of `/run`, which is a link to `/var/run` in that image, and to a volume
/// that is a link.
#[test]
fn nothing_lies_over_a_writable_directory() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    fs::create_dir_all(root.path().join("var/run/app")).unwrap();
    fs::create_dir_all(root.path().join("var/data/sub")).unwrap();
    symlink("/var/run", root.path().join("run")).unwrap();
    symlink("/var/data", root.path().join("led")).unwrap();
    let image = parse(r#"{"config": {"Cmd": ["x"], "Volumes": {"/led": {}}}}"#);
    let make = |dir: &str| {
        let writable_dirs = vec![dir.into()];
        let options = Options { readonly: true, writable_dirs, ..Options::default() };
        write(bundle.path(), root.path(), &image, &options, Path::new("/"))
    };
    let destinations = |made: Value| -> Vec<String> {
        let mounts = made["mounts"].as_array().unwrap().iter();
        mounts.map(|mount| mount["destination"].as_str().unwrap().to_owned()).collect()
    };
    let all = destinations(make("/etc").unwrap());
    assert!(all.contains(&"/var/run".to_owned()) && all.contains(&"/var/data".to_owned()));
    for dir in ["/var/run/app", "/var/run", "/var"] {
        assert!(!destinations(make(dir).unwrap()).contains(&"/var/run".to_owned()), "{dir}");
    }
    assert!(!destinations(make("/var/data").unwrap()).contains(&"/var/data".to_owned()));
    let error = make("/var/data/sub").unwrap_err();
    assert_eq!(error.to_string(), "volume `/led` would hide what lies at /var/data/sub");
    // A recorded start that wrote there is none that the caller named: it writes to the volume.
    let options = Options {
        readonly: true,
        writable_dirs: vec!["/var/data/sub".into(), "/var/run/app".into()],
        writable_recorded: true,
        ..Options::default()
    };
    let made = write(bundle.path(), root.path(), &image, &options, Path::new("/"));
    let all = destinations(made.unwrap());
    assert!(!all.contains(&"/var/run".to_owned()) && all.contains(&"/var/data".to_owned()));
}

/// The image lacked a volume that the runtime makes in the tmpfs of `/run`, and nothing started.
#[test]
fn a_volume_can_be_made_in_a_directory_in_memory() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    fs::create_dir(root.path().join("run")).unwrap();
    let options = Options { readonly: true, ..Options::default() };
    for (path, is_made) in [("/run/app", true), ("/srv/app", false)] {
        let image = json!({"config": {"Cmd": ["x"], "Volumes": {path: {}}}}).to_string();
        let made = write(bundle.path(), root.path(), &parse(&image), &options, Path::new("/"));
        assert_eq!(made.is_ok(), is_made, "{path}");
    }
    let made = bundle.path().join("volumes/run%2Fapp").metadata().unwrap();
    assert_eq!(made.permissions().mode() & 0o7777, 0o755);
}

/// A volume that a link leads deep below another one was mounted first, and the other one hid it. An image
/// with 32,000 volumes kept `run` busy for 40 seconds.
#[test]
fn no_volume_hides_another_one() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    fs::create_dir_all(root.path().join("d/e/f")).unwrap();
    symlink("/d/e/f", root.path().join("l")).unwrap();
    symlink("/data", root.path().join("same")).unwrap();
    let options = Options { readonly: true, ..Options::default() };
    let make = |volumes: Value| {
        let image = json!({"config": {"Cmd": ["x"], "Volumes": volumes}}).to_string();
        write(bundle.path(), root.path(), &parse(&image), &options, Path::new("/"))
    };
    let volumes = json!({"/l": {}, "/d/e": {}, "/data": {}, "/same": {}});
    let made = make(volumes).unwrap();
    let all = made["mounts"].as_array().unwrap().iter();
    let all = all.filter_map(|mount| mount["destination"].as_str());
    let at: Vec<_> = all.filter(|it| it.starts_with("/d/") || *it == "/data").collect();
    assert_eq!(at, ["/data", "/d/e", "/d/e/f"]);
    let many = (0..1001).map(|number| (format!("/data/{number}"), json!({}))).collect();
    assert!(matches!(make(Value::Object(many)), Err(BundleError::TooManyVolumes(1001))));
}

/// The runtime copied what an image has in `/tmp`, `/var/tmp` and `/run` into memory, holes of files
/// as well, and runc did that before it set the limit: an image of 1 MB took all of the machine's.
#[test]
fn directories_in_memory_hold_no_more_than_the_limit() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    for (limit, size) in
        [(None, None), (Some(64 << 20), Some("size=67108864")), (Some(0), Some("size=65536"))]
    {
        let options = Options { readonly: true, memory_bytes: limit, ..Options::default() };
        let made =
            write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/")).unwrap();
        let mounts = made["mounts"].as_array().unwrap();
        let tmp = mounts.iter().find(|mount| mount["destination"] == "/tmp").unwrap();
        let mut options = tmp["options"].as_array().unwrap().iter().filter_map(Value::as_str);
        assert_eq!(options.rfind(|it| it.starts_with("size=")), size);
    }
}

/// With a deep tree and many links an image kept `run` busy for an hour, whatever signal came.
#[test]
fn lookups_have_an_end() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    let deep = "/x".repeat(900);
    fs::create_dir_all(root.path().join(&deep[1..])).unwrap();
    for number in 0..38 {
        let to = format!("{deep}/link{}", number + 1);
        symlink(to, root.path().join(format!("{}/link{number}", &deep[1..]))).unwrap();
    }
    let path = format!("{deep}/link0");
    let image = json!({"config": {"Cmd": ["x"], "Volumes": {path: {}}}}).to_string();
    let options = Options { readonly: true, ..Options::default() };
    let error = write(bundle.path(), root.path(), &parse(&image), &options, Path::new("/"));
    let said = cofolio_store::with_causes(&error.unwrap_err());
    assert!(said.contains("names"), "{said}");
}

/// `/etc/resolv.conf` of an image that has had systemd leads to a file that only systemd makes: the runtime could not make
/// it in a read-only root.
#[test]
fn network_files_of_the_host_are_where_links_lead() {
    let (root, bundle) = (rootfs_of_redis(), tempfile::tempdir().unwrap());
    fs::create_dir(root.path().join("run")).unwrap();
    fs::write(root.path().join("etc/hosts"), "").unwrap();
    symlink("../run/systemd/resolve/stub", root.path().join("etc/resolv.conf")).unwrap();
    let options = Options { readonly: true, host_network: true, ..Options::default() };
    let config = write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/"));
    let config = config.unwrap();
    let at = |file: &str| place(&config, Path::new(file));
    if Path::new("/etc/resolv.conf").exists() {
        assert_eq!(at("/etc/resolv.conf").unwrap(), "/run/systemd/resolve/stub");
    }
    assert_eq!(at("/etc/hosts").unwrap(), "/etc/hosts");
    // The caller's own lie over them, which was refused as missing.
    let own = NamedTempFile::new().unwrap();
    let source = own.path().to_owned();
    let binds = ["/etc/hosts", "/etc/resolv.conf"].map(|target| Bind {
        source: source.clone(),
        target: target.to_owned(),
        readonly: true,
    });
    for readonly in [true, false] {
        let options = Options { readonly, binds: binds.to_vec(), ..options.clone() };
        write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/")).unwrap();
    }
    // Beside a writable directory in it `/etc` cannot be in memory: names were not resolved, without a word.
    fs::remove_file(root.path().join("etc/hosts")).unwrap();
    fs::create_dir(root.path().join("etc/app")).unwrap();
    for (dir, is_made) in [("/etc/app", false), ("/etc", true)] {
        let options = Options { writable_dirs: vec![dir.into()], ..options.clone() };
        let made = write(bundle.path(), root.path(), &parse(REDIS), &options, Path::new("/"));
        assert_eq!(made.is_ok(), is_made, "{dir}");
    }
    // Of the mounts at `/etc`, none was needed.
    let mut mounts = config["mounts"].as_array().unwrap().iter();
    assert!(!mounts.any(|mount| mount["destination"] == "/etc"), "{config}");
}
