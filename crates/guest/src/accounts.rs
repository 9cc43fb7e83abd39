//! Users and groups as an image's own `/etc/passwd` and `/etc/group` have them. The host looks them
//! up for containers, a guest for itself.

use std::collections::BTreeSet;
use std::fmt;

/// A user, as processes have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// That of its group.
    pub gid: u32,
    /// All groups, the primary one first: without it among the supplementary groups, a process
    /// passes checks that deny that group (CVE-2022-36109).
    pub additional_gids: Vec<u32>,
}

/// Why a user was not found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccountError {
    /// The account files lack a user or group.
    Unknown {
        /// `user` or `group`.
        kind: &'static str,
        /// As it was given.
        name: String,
        /// `/etc/passwd` or `/etc/group`.
        file: &'static str,
    },
    /// 2^32 - 1 is no number of a user or group, and there are no higher ones.
    NoId(String),
}

impl fmt::Display for AccountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { kind, name, file } => {
                write!(f, "{kind} `{name}` is not in the image's {file}")
            }
            Self::NoId(name) => {
                write!(f, "user `{name}`: numbers of users and groups are below 4294967295")
            }
        }
    }
}

impl std::error::Error for AccountError {}

type Result<T> = std::result::Result<T, AccountError>;

/// Resolves `user[:group]` in the texts of the account files, as Docker and runc do.
///
/// A number without an account stands for itself, with group 0; an unknown name is an error. With
/// an explicit group there are no supplementary groups; without one, those that list the user.
///
/// # Errors
/// [`AccountError`].
pub fn find_user(passwd: &str, groups: &str, spec: &str) -> Result<User> {
    let found = look_up(passwd, groups, spec)?;
    // To system calls that set ids, this is "leave it as it is": as root.
    let is_none = |id: &u32| *id == u32::MAX;
    match is_none(&found.uid) || found.additional_gids.iter().any(is_none) {
        true => Err(AccountError::NoId(spec.to_owned())),
        false => Ok(found),
    }
}

/// The home directory of a user, if the account file has one.
pub fn home_of(passwd: &str, uid: u32) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let is_it = fields.get(2)?.parse() == Ok(uid);
        fields.get(5).copied().filter(|home| is_it && !home.is_empty())
    })
}

fn look_up(passwd: &str, groups: &str, spec: &str) -> Result<User> {
    let (user, group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    // No account can have a name that is a number to others (CVE-2016-3697).
    let number = numeric(user)?;

    // name:password:uid:gid:comment:home:shell
    let account = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let (name, uid, gid) = (fields.first()?, fields.get(2)?, fields.get(3)?);
        let (uid, gid): (u32, u32) = (uid.parse().ok()?, gid.parse().ok()?);
        let is_it = number.map_or(*name == user, |number| number == uid);
        is_it.then(|| ((*name).to_owned(), uid, gid))
    });
    let (name, uid, gid) = match (account, number) {
        (Some((name, uid, gid)), _) => (Some(name), uid, gid),
        (None, Some(uid)) => (None, uid, 0),
        (None, None) => {
            return Err(AccountError::Unknown {
                kind: "user",
                name: user.to_owned(),
                file: "/etc/passwd",
            });
        }
    };

    // name:password:gid:members
    let mut parsed = groups.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let (name, gid) = (*fields.first()?, fields.get(2)?.parse::<u32>().ok()?);
        Some((name, gid, fields.get(3).copied().unwrap_or_default()))
    });
    if let Some(group) = group {
        let number = numeric(group)?;
        let found =
            parsed.find(|(name, gid, _)| number.map_or(*name == group, |number| number == *gid));
        let gid = found.map(|(_, gid, _)| gid).or(number);
        let gid = gid.ok_or_else(|| AccountError::Unknown {
            kind: "group",
            name: group.to_owned(),
            file: "/etc/group",
        })?;
        return Ok(User { uid, gid, additional_gids: vec![gid] });
    }
    let mut additional_gids = vec![gid];
    let mut known = BTreeSet::from([gid]);
    if let Some(name) = name {
        for (_, gid, members) in parsed {
            if members.split(',').any(|member| member.trim() == name) && known.insert(gid) {
                additional_gids.push(gid);
            }
        }
    }
    Ok(User { uid, gid, additional_gids })
}

/// The number of a user or group that is given as one.
fn numeric(text: &str) -> Result<Option<u32>> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| AccountError::NoId(text.to_owned()))
}
