//! The kernel's samepage merging, as benchmarks set and read it.

use std::fs;

use anyhow::{Context as _, Result, ensure};

const DIR: &str = "/sys/kernel/mm/ksm";

/// Fails if somebody uses it.
pub(crate) fn ensure_unused() -> Result<()> {
    ensure!(figure("run")? == 0, "somebody uses KSM: {DIR}/run is not 0");
    Ok(())
}

pub(crate) fn figure(name: &str) -> Result<u64> {
    let path = format!("{DIR}/{name}");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    text.trim().parse().with_context(|| path)
}

/// Pages that it saves now.
pub(crate) fn saved_pages() -> Result<u64> {
    Ok(figure("pages_sharing")? + figure("ksm_zero_pages").unwrap_or(0))
}

/// Bytes that processes share through KSM. Pages of zeros do not count.
pub(crate) fn sharing_bytes() -> Result<u64> {
    Ok(figure("pages_sharing")? * 4096)
}

fn set(name: &str, value: u64) -> Result<()> {
    let path = format!("{DIR}/{name}");
    fs::write(&path, value.to_string()).with_context(|| path)
}

/// KSM at work. Dropping it unmerges all pages and restores the former settings.
pub(crate) struct Ksm(Vec<(&'static str, u64)>);

impl Ksm {
    /// Starts it: as fast as it can, and zeros become the kernel's page of zeros; or, unless
    /// `fast`, with the kernel's defaults. Fails if somebody else has started it meanwhile.
    pub(crate) fn start(fast: bool) -> Result<Self> {
        ensure_unused()?;
        let names = ["pages_to_scan", "sleep_millisecs", "use_zero_pages"];
        let before = names.iter().map(|name| Ok((*name, figure(name)?)));
        let ksm = Self(before.collect::<Result<_>>()?);
        let [pages, sleep, zeros] = if fast { [1_000_000, 0, 1] } else { [100, 20, 0] };
        set("pages_to_scan", pages)?;
        set("sleep_millisecs", sleep)?;
        set("use_zero_pages", zeros)?;
        set("run", 1)?;
        Ok(ksm)
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        let _ = set("run", 2);
        for (name, value) in &self.0 {
            let _ = set(name, *value);
        }
        let _ = set("run", 0);
    }
}
