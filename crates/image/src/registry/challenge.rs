//! `WWW-Authenticate`: what a registry wants to see (RFC 9110, section 11.6.1).

/// Parameters of one challenge that are looked at.
const PARAMETERS_MAX: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer { realm: String, service: String },
}

/// The best challenge in the header's values: Bearer before Basic, `None` if we know none.
pub(crate) fn best<'a>(values: impl Iterator<Item = &'a str>) -> Option<Challenge> {
    let mut basic = None;
    for value in values {
        for (scheme, parameters) in parse(value) {
            let get = |name: &str| {
                let found = parameters.iter().find(|(key, _)| key == name);
                found.map(|(_, value)| value.clone())
            };
            match scheme.as_str() {
                "bearer" => {
                    if let Some(realm) = get("realm") {
                        let service = get("service").unwrap_or_default();
                        return Some(Challenge::Bearer { realm, service });
                    }
                }
                "basic" => basic = Some(Challenge::Basic),
                _ => {}
            }
        }
    }
    basic
}

type Parsed = (String, Vec<(String, String)>);

/// Schemes and their parameters, names in lower case. What cannot be understood ends the list.
fn parse(value: &str) -> Vec<Parsed> {
    let mut found: Vec<Parsed> = Vec::new();
    let mut rest = value.trim_start_matches([' ', '\t', ',']);
    while !rest.is_empty() {
        let (name, after) = token(rest);
        if name.is_empty() {
            break;
        }
        let name = name.to_ascii_lowercase();
        match after.trim_start().strip_prefix('=') {
            // A parameter of the last scheme.
            Some(after) => {
                let Some((value, after)) = parameter(after.trim_start()) else { break };
                match found.last_mut() {
                    Some((_, parameters)) if parameters.len() < PARAMETERS_MAX => {
                        parameters.push((name, value));
                    }
                    _ => break,
                }
                rest = after;
            }
            None => {
                if found.len() == PARAMETERS_MAX {
                    break;
                }
                found.push((name, Vec::new()));
                rest = after;
            }
        }
        rest = rest.trim_start_matches([' ', '\t', ',']);
    }
    found
}

fn token(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)));
    text.split_at(end.unwrap_or(text.len()))
}

/// A token or a quoted string.
fn parameter(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = token(text);
        return Some((value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(realm: &str, service: &str) -> Option<Challenge> {
        Some(Challenge::Bearer { realm: realm.into(), service: service.into() })
    }

    #[test]
    fn challenges_as_registries_write_them() {
        for (value, expected) in [
            (
                r#"Bearer realm="https://auth.example/token",service="reg",scope="repository:a,b:pull""#,
                bearer("https://auth.example/token", "reg"),
            ),
            (r#"bearer REALM = "a\"b" , service=s"#, bearer("a\"b", "s")),
            (r#"Basic realm="x, Bearer y""#, Some(Challenge::Basic)),
            (r#"Negotiate, Basic realm="x", Bearer realm="r""#, bearer("r", "")),
            (r#"Bearer service="no realm""#, None),
            ("Negotiate abc==", None),
            ("", None),
        ] {
            assert_eq!(best([value].into_iter()), expected, "{value}");
        }
        let both = ["Basic realm=\"x\"", "Bearer realm=\"r\""];
        assert_eq!(best(both.into_iter()), bearer("r", ""));
    }

    /// Whatever a server sends ends in a challenge or in none.
    #[test]
    fn hostile_headers_end() {
        let words = ["Bearer", "realm", "=", "\"", "\\", ",", " ", "é", "a", "\t", "=="];
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..12 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push_str(words[usize::try_from(state >> 33).unwrap_or(0) % words.len()]);
            }
            let _ = best([text.as_str()].into_iter());
        }
        let many = "a=b,".repeat(100_000);
        assert_eq!(best([format!("Bearer {many}").as_str()].into_iter()), None);
    }
}
