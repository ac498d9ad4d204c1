//! Where a broker is and who asks: addresses, the `Host` line, credentials.

use std::net::{SocketAddr, ToSocketAddrs};

use base64::engine::general_purpose::STANDARD;
use base64::Engine;

use crate::run::Failure;

const PORT: u16 = 7942;

/// One broker, or several nodes of one.
#[derive(Clone, Debug)]
pub struct Target {
    /// Connections go to these in turn.
    pub addresses: Vec<SocketAddr>,
    /// As the client names the first one.
    pub host: String,
    /// The value of `Authorization`, if there is one.
    pub authorization: Option<String>,
}

impl Target {
    /// `http://host[:port][/]`, several if the broker has several nodes.
    pub fn parse(urls: &[String], credentials: &Credentials) -> Result<Target, Failure> {
        let mut addresses = Vec::new();
        for url in urls {
            addresses.push(resolve(authority(url)?)?);
        }
        let host = urls.first().map(|url| authority(url)).transpose()?.unwrap_or("127.0.0.1").to_owned();
        Ok(Target { addresses, host, authorization: credentials.header()? })
    }

    pub fn of(address: SocketAddr, credentials: &Credentials) -> Result<Target, Failure> {
        Ok(Target { addresses: vec![address], host: address.to_string(), authorization: credentials.header()? })
    }

    /// The lines that every request carries, each with its end.
    pub fn header_lines(&self) -> String {
        let mut lines = format!("Host: {}\r\nX-Narad-Client: narad-bench\r\n", self.host);
        if let Some(value) = &self.authorization {
            lines.push_str("Authorization: ");
            lines.push_str(value);
            lines.push_str("\r\n");
        }
        lines
    }
}

fn authority(url: &str) -> Result<&str, Failure> {
    let wrong = |why: &str| Failure(format!("--url {url} {why}: write http://host:port"));
    if url.starts_with("https://") {
        return Err(wrong("is https, which ends in front of a broker; this program speaks plain HTTP"));
    }
    let authority = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
    if authority.is_empty() || authority.contains(['/', '?', '#', '@', ' ']) {
        return Err(wrong("is more, or less, than a host and a port"));
    }
    Ok(authority)
}

fn resolve(authority: &str) -> Result<SocketAddr, Failure> {
    let has_port = authority.rsplit_once(':').is_some_and(|(host, port)| {
        !port.is_empty()
            && port.bytes().all(|byte| byte.is_ascii_digit())
            && (!host.contains(':') || host.ends_with(']'))
    });
    let with_port = if has_port { authority.to_owned() } else { format!("{authority}:{PORT}") };
    let mut found = with_port.to_socket_addrs().map_err(|error| {
        Failure(format!("--url {authority}: cannot find that host: {error}; write http://host:port, such as http://127.0.0.1:{PORT}"))
    })?;
    found.next().ok_or_else(|| Failure(format!("--url {authority}: that host has no address")))
}

/// What was given of `--user`, `--password`, `--token`.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    pub user: Option<String>,
    pub password: Option<String>,
    pub token: Option<String>,
}

impl Credentials {
    fn header(&self) -> Result<Option<String>, Failure> {
        match (&self.user, &self.password, &self.token) {
            (None, None, None) => Ok(None),
            (None, None, Some(token)) => Ok(Some(format!("Bearer {token}"))),
            (Some(user), Some(password), None) => {
                Ok(Some(format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))))
            }
            (Some(user), None, None) => match std::env::var("NARAD_PASSWORD") {
                Ok(password) => Ok(Some(format!("Basic {}", STANDARD.encode(format!("{user}:{password}"))))),
                Err(_) => Err(Failure(format!("--user {user} needs --password, or NARAD_PASSWORD in the environment"))),
            },
            (None, Some(_), _) => Err(Failure("--password needs --user".into())),
            (Some(_), _, Some(_)) => Err(Failure("--user and --token exclude each other: give one of them".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target, Failure> {
        Target::parse(&[url.to_owned()], &Credentials::default())
    }

    #[test]
    fn a_url_is_a_host_and_perhaps_a_port() {
        for (url, address) in [
            ("http://127.0.0.1:8000/", "127.0.0.1:8000"),
            ("127.0.0.1", "127.0.0.1:7942"),
            ("http://[::1]:9", "[::1]:9"),
            ("http://[::1]", "[::1]:7942"),
        ] {
            assert_eq!(target(url).unwrap().addresses, [address.parse::<SocketAddr>().unwrap()], "{url}");
        }
        for url in ["https://127.0.0.1", "http://127.0.0.1/v1", "http://", "http://127.0.0.1:99999"] {
            assert!(target(url).unwrap_err().0.contains("http://host:port"), "{url}");
        }
    }

    #[test]
    fn credentials_become_a_header_or_a_sentence() {
        let some = |text: &str| Some(text.to_owned());
        let basic = Credentials { user: some("ann"), password: some("x"), token: None };
        assert_eq!(basic.header().unwrap(), some("Basic YW5uOng="));
        let token = Credentials { token: some("t"), ..Credentials::default() };
        assert_eq!(token.header().unwrap(), some("Bearer t"));
        let both = Credentials { token: some("t"), ..basic };
        assert!(both.header().unwrap_err().0.contains("exclude each other"));
    }
}
