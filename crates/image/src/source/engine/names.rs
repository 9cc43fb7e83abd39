//! Finding an image by its name.

use super::EngineError;
use crate::source::listed;

/// Names that an error lists.
const NAMES_SHOWN: usize = 20;

/// An image in a store of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference<Location> {
    /// Where the store is.
    pub location: Location,
    /// Name, name with a digest, or beginning of a digest or id.
    pub name: String,
}

/// Splits `[STORE]NAME`, what follows `FORM:`, into the two. Without brackets there is no store.
pub(super) fn split_store<'a>(
    form: &str,
    text: &'a str,
) -> Result<(Option<&'a str>, &'a str), EngineError> {
    let (store, name) = match text.strip_prefix('[') {
        None => (None, text),
        Some(rest) => {
            let (store, name) =
                rest.split_once(']').ok_or_else(|| wrong(form, text, "no closing `]`"))?;
            (Some(store), name)
        }
    };
    if name.is_empty() {
        return Err(wrong(form, text, "no image is named"));
    }
    Ok((store, name))
}

pub(super) fn wrong(form: &str, text: &str, what: &str) -> EngineError {
    EngineError::NotFound { what: format!("{form}:{text}: {what}") }
}

/// An image that can be asked for by name.
pub(super) trait Named {
    /// Whole names, with tags.
    fn names(&self) -> &[String];
    /// The digest that may stand behind a name's `@`.
    fn digest(&self) -> &str;
    /// Hex digits, by the first few of which it can be asked for.
    fn id(&self) -> &str;
}

/// The images that podman would take for `name`: by whole name, by the end of one (`redis` is
/// `docker.io/library/redis:latest`), by name and digest, by the beginning of the id.
pub(super) fn matching<'a, I: Named>(images: &'a [I], name: &str) -> Vec<&'a I> {
    let (plain, digest) = match name.split_once('@') {
        Some((plain, digest)) => (plain, Some(digest)),
        None => (name, None),
    };
    let repository = |name: &str| match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository.to_owned(),
        _ => name.to_owned(),
    };
    let tagged = repository(plain) != plain;
    let wanted =
        if tagged || digest.is_some() { plain.to_owned() } else { format!("{plain}:latest") };
    let is_name = |have: &String, end: bool| {
        let have = if digest.is_some() && !tagged {
            repository(have.split('@').next().unwrap_or(have))
        } else {
            have.clone()
        };
        have == wanted || end && have.strip_suffix(&wanted).is_some_and(|h| h.ends_with('/'))
    };
    let is_digest = |image: &&I| digest.is_none_or(|digest| image.digest() == digest);
    let by = |end: bool| -> Vec<&I> {
        let named = |image: &&I| image.names().iter().any(|name| is_name(name, end));
        images.iter().filter(named).filter(is_digest).collect()
    };
    let by_id = || -> Vec<&I> {
        let id = name.strip_prefix("sha256:").unwrap_or(name);
        let hex = id.len() >= 3 && id.bytes().all(|b| b.is_ascii_hexdigit());
        images.iter().filter(|image| hex && image.id().starts_with(id)).collect()
    };
    // containerd takes any name, also one without a tag.
    let exactly = || -> Vec<&I> {
        images.iter().filter(|image| image.names().iter().any(|have| have == name)).collect()
    };
    let ways: [&dyn Fn() -> Vec<&'a I>; 4] = [&exactly, &|| by(false), &|| by(true), &by_id];
    ways.into_iter().map(|way| way()).find(|found| !found.is_empty()).unwrap_or_default()
}

/// The error for a missing image, with the names that exist.
pub(super) fn none<I: Named>(images: &[I], name: &str, place: &str) -> EngineError {
    let mut names: Vec<&str> = images.iter().flat_map(I::names).map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let more = names.len().saturating_sub(NAMES_SHOWN);
    names.truncate(NAMES_SHOWN);
    let mut there = listed(&names);
    if more > 0 {
        there += &format!(" and {more} more");
    }
    let there = match there.is_empty() {
        true => "it has none with a name".to_owned(),
        false => format!("it has: {there}"),
    };
    EngineError::NotFound { what: format!("{place} has no image {name:?}; {there}") }
}
