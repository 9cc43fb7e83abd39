//! `WWW-Authenticate`: what a registry wants to see (RFC 9110, section 11.6.1).

use http_auth::parser::ChallengeParser;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer { realm: String, service: String },
}

/// The best challenge in the header's values: Bearer before Basic, `None` if we know none.
pub(crate) fn best<'a>(values: impl Iterator<Item = &'a str>) -> Option<Challenge> {
    let mut basic = None;
    for value in values {
        // What cannot be understood ends the list.
        for challenge in ChallengeParser::new(value).map_while(Result::ok) {
            let get = |name: &str| {
                let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
                found.map(|(_, value)| value.to_unescaped())
            };
            if challenge.scheme.eq_ignore_ascii_case("basic") {
                basic = Some(Challenge::Basic);
            } else if challenge.scheme.eq_ignore_ascii_case("bearer")
                && let Some(realm) = get("realm")
            {
                let service = get("service").unwrap_or_default();
                return Some(Challenge::Bearer { realm, service });
            }
        }
    }
    basic
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
