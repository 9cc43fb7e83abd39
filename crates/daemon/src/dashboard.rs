//! The dashboard: plain files, which ask the API of the same server.

use hyper::StatusCode;
use hyper::header::{CONTENT_SECURITY_POLICY, HeaderValue};

use crate::http::{Reply, reply};

/// Nothing from elsewhere, no inline scripts or styles, and no text is ever taken for markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'";

const SCRIPT: &str = "text/javascript";

/// Name, kind and content.
const FILES: [(&str, &str, &[u8]); 9] = [
    ("", "text/html; charset=utf-8", include_bytes!("../dashboard/index.html")),
    ("style.css", "text/css", include_bytes!("../dashboard/style.css")),
    ("icon.svg", "image/svg+xml", include_bytes!("../dashboard/icon.svg")),
    ("accounts.js", SCRIPT, include_bytes!("../dashboard/accounts.js")),
    ("app.js", SCRIPT, include_bytes!("../dashboard/app.js")),
    ("chart.js", SCRIPT, include_bytes!("../dashboard/chart.js")),
    ("matrix.js", SCRIPT, include_bytes!("../dashboard/matrix.js")),
    ("table.js", SCRIPT, include_bytes!("../dashboard/table.js")),
    ("ui.js", SCRIPT, include_bytes!("../dashboard/ui.js")),
];

/// The file of that name.
pub(crate) fn file(name: &str) -> Option<Reply> {
    let (_, kind, content) = FILES.iter().find(|(it, ..)| *it == name)?;
    let mut reply = reply(StatusCode::OK, kind, *content);
    reply.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    Some(reply)
}
