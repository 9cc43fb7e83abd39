//! A distribution's kernel for guests, and the modules that a guest needs of it.
//!
//! ```text
//! vmlinuz                              the kernel, as the distribution packages it
//! lib/modules/<version>/modules.dep    which modules are where, and need which others
//! lib/modules/<version>/modules.builtin
//! ```

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::error::{Result, VmError};

/// What every guest needs: its devices, the image's filesystem, and the overlay for changes.
const NEEDED: [&str; 7] = [
    "virtio_pci",
    "virtio_console",
    "virtio_balloon",
    "virtio_pmem",
    "nd_pmem",
    "erofs",
    "overlay",
];
/// What some of these ask for by an alias, in kernels that have it as a module: `libcrc32c` takes
/// any implementation. There is no modprobe in the guest.
const ASKED_FOR: [&str; 1] = ["crc32c_generic"];
/// Largest module, uncompressed, in bytes.
const MODULE_BYTES_MAX: u64 = 64 << 20;
/// Largest index of modules.
const INDEX_BYTES_MAX: u64 = 16 << 20;

/// A kernel, with its modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its file.
    pub image: PathBuf,
    /// Its version, which names the directory of its modules.
    pub version: String,
    /// `lib/modules/<version>`.
    modules: PathBuf,
}

impl Kernel {
    /// The kernel in a file. Its modules are in `lib/modules` beside it or below `/`.
    ///
    /// # Errors
    /// [`VmError::Kernel`].
    pub fn open(image: &Path) -> Result<Self> {
        let wrong = |why: String| VmError::Kernel { path: image.to_owned(), why };
        let image = std::path::absolute(image).map_err(|error| wrong(error.to_string()))?;
        let beside = image.parent().unwrap_or(Path::new("/"));
        let tops = [beside, beside.parent().unwrap_or(beside), Path::new("/")];
        let versions = versions(&image).map_err(|error| wrong(error.to_string()))?;
        for version in &versions {
            let places = tops.iter().map(|top| top.join("lib/modules").join(version));
            if let Some(modules) = places.into_iter().find(|dir| dir.join("modules.dep").is_file())
            {
                return Ok(Self { image, version: version.clone(), modules });
            }
        }
        Err(wrong(match versions.first() {
            Some(version) => {
                format!("there is no lib/modules/{version}/modules.dep beside it or in /")
            }
            None => "it does not say its version, and its file is not named vmlinuz-VERSION".into(),
        }))
    }

    /// The one that this machine runs if its file is there, else the newest in `/boot` that has
    /// modules.
    ///
    /// # Errors
    /// [`VmError::NoKernel`].
    pub fn of_this_machine(root: &Path) -> Result<Self> {
        let boot = root.join("boot");
        let running = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut found: Vec<PathBuf> = fs::read_dir(&boot)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| file_version(path).is_some())
            .collect();
        let modified = |path: &PathBuf| fs::metadata(path).and_then(|it| it.modified()).ok();
        found.sort_by_key(modified);
        found.reverse();
        let own = found.iter().position(|path| file_version(path) == Some(&running));
        if let Some(own) = own {
            found.swap(0, own);
        }
        found.iter().find_map(|path| Self::open(path).ok()).ok_or(VmError::NoKernel)
    }

    /// The modules that a guest needs, and `more`, in an order in which they can be loaded: names
    /// and contents, uncompressed.
    ///
    /// # Errors
    /// [`VmError::Kernel`] if the kernel lacks one.
    pub fn modules(&self, more: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let wrong = |why: String| VmError::Kernel { path: self.image.clone(), why };
        let read = |name: &str| {
            let path = self.modules.join(name);
            read_text(&path).map_err(|error| wrong(format!("{}: {error}", path.display())))
        };
        let (dependencies, builtin) = (read("modules.dep")?, read("modules.builtin")?);
        let is_module = |name: &&&str| dependencies.lines().any(|line| is_of(line, name));
        let first = ASKED_FOR.iter().filter(is_module);
        let paths = in_order(&dependencies, &builtin, first.chain(&NEEDED).chain(more))
            .map_err(|name| wrong(format!("it has no module {name}, which guests need")))?;
        let module = |path: &str| {
            let file = self.modules.join(path);
            let content = uncompressed(&file)
                .map_err(|error| wrong(format!("{}: {error}", file.display())))?;
            Ok((module_name(path), content))
        };
        paths.into_iter().map(module).collect()
    }
}

/// The version in the name of a file.
fn file_version(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()?.strip_prefix("vmlinuz-")
}

/// What may be the version of a kernel, by its header (x86) and by its file's name.
fn versions(image: &Path) -> io::Result<Vec<String>> {
    let file = File::open(image)?;
    let mut found = Vec::new();
    let mut header = [0; 0x210];
    // Documentation/arch/x86/boot.rst: at 0x20e the offset of a text, less 0x200.
    if file.read_exact_at(&mut header, 0).is_ok() && header[0x202..0x206] == *b"HdrS" {
        let at = u64::from(u16::from_le_bytes([header[0x20e], header[0x20f]])) + 0x200;
        let mut text = [0; 128];
        let length = file.read_at(&mut text, at)?;
        let text = String::from_utf8_lossy(&text[..length]);
        found.extend(text.split([' ', '\0']).next().map(str::to_owned));
    }
    found.extend(file_version(image).map(str::to_owned));
    // It becomes a part of a path.
    found.retain(|version| !version.is_empty() && !version.contains('/') && version != "..");
    Ok(found)
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(INDEX_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// `kernel/fs/erofs/erofs.ko.xz` is `erofs`. Names in files have `-` where the kernel has `_`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

/// Whether a line of modules.dep is that of a module.
fn is_of(line: &str, name: &str) -> bool {
    line.split_once(':').is_some_and(|(path, _)| module_name(path) == name)
}

/// The paths of modules and of those that they need, each after what it needs; without built-in
/// ones. The name of one that is missing otherwise.
fn in_order<'t>(
    dependencies: &'t str,
    builtin: &str,
    wanted: impl Iterator<Item = &'t &'t str>,
) -> Result<Vec<&'t str>, &'t str> {
    let builtin: HashSet<String> = builtin.lines().map(module_name).collect();
    let mut order = Vec::new();
    for name in wanted {
        if builtin.contains(*name) {
            continue;
        }
        // `a.ko: b.ko c.ko`: b needs c, as far as they need each other (depmod).
        let lines = dependencies.lines().filter_map(|line| line.split_once(':'));
        let (path, needs) =
            lines.into_iter().find(|(path, _)| module_name(path) == *name).ok_or(*name)?;
        for path in needs.split_whitespace().rev().chain([path]) {
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    Ok(order)
}

/// The content of a module's file. The kernel could decompress it, if it was built so.
fn uncompressed(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let compression = path.extension().and_then(|it| it.to_str()).unwrap_or_default();
    let mut content = Vec::new();
    match compression {
        "xz" => {
            let mut reader = lzma_rust2::XzReader::new(io::BufReader::new(file), true);
            reader.by_ref().take(MODULE_BYTES_MAX).read_to_end(&mut content)?
        }
        "zst" => zstd::Decoder::new(file)?.take(MODULE_BYTES_MAX).read_to_end(&mut content)?,
        "gz" => {
            let reader = flate2::read::MultiGzDecoder::new(file);
            reader.take(MODULE_BYTES_MAX).read_to_end(&mut content)?
        }
        _ => file.take(MODULE_BYTES_MAX).read_to_end(&mut content)?,
    };
    Ok(content)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    const DEPENDENCIES: &str = "\
kernel/fs/erofs/erofs.ko.xz: kernel/fs/netfs/netfs.ko.xz
kernel/fs/netfs/netfs.ko.xz:
kernel/drivers/nvdimm/nd_virtio.ko.xz: kernel/drivers/nvdimm/libnvdimm.ko.xz
kernel/drivers/nvdimm/virtio_pmem.ko.xz: kernel/drivers/nvdimm/nd_virtio.ko.xz kernel/drivers/nvdimm/libnvdimm.ko.xz
kernel/drivers/nvdimm/libnvdimm.ko.xz:
kernel/drivers/char/virtio-rng.ko:
";

    #[test]
    fn modules_come_after_those_that_they_need() {
        let order = in_order(
            DEPENDENCIES,
            "kernel/drivers/virtio/virtio_pci.ko\n",
            ["virtio_pci", "virtio_pmem", "erofs", "virtio_rng", "nd_virtio"].iter(),
        );
        let names: Vec<_> = order.unwrap().into_iter().map(module_name).collect();
        let expected = ["libnvdimm", "nd_virtio", "virtio_pmem", "netfs", "erofs", "virtio_rng"];
        assert_eq!(names, expected);
        assert_eq!(in_order(DEPENDENCIES, "", ["overlay"].iter()), Err("overlay"));
    }

    #[test]
    fn a_kernel_is_found_with_its_modules() {
        let dir = tempfile::tempdir().unwrap();
        let boot = dir.path().join("boot");
        for (version, has_modules) in [("6.1.0-1", true), ("6.12.0-3", true), ("7.2.0", false)] {
            let modules = dir.path().join("lib/modules").join(version);
            fs::create_dir_all(&modules).unwrap();
            fs::create_dir_all(&boot).unwrap();
            if has_modules {
                fs::write(modules.join("modules.dep"), DEPENDENCIES).unwrap();
            }
            fs::write(boot.join(format!("vmlinuz-{version}")), "not of x86").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let kernel = Kernel::of_this_machine(dir.path()).unwrap();
        assert_eq!(kernel.version, "6.12.0-3");
        let older = Kernel::open(&boot.join("vmlinuz-6.1.0-1")).unwrap();
        assert_eq!(older.modules, dir.path().join("lib/modules/6.1.0-1"));
        let error = Kernel::open(&boot.join("vmlinuz-7.2.0")).unwrap_err();
        assert!(error.to_string().contains("lib/modules/7.2.0"), "{error}");
        // The header says the version, whatever the file's name is.
        let mut image = vec![0; 0x400];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
        image[0x300..0x313].copy_from_slice(b"6.1.0-1 (builder) #");
        fs::write(boot.join("kernel"), image).unwrap();
        assert_eq!(Kernel::open(&boot.join("kernel")).unwrap().version, "6.1.0-1");
        assert!(Kernel::of_this_machine(&boot).is_err());
    }
}
