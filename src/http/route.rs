//! The route table: paths, methods, and the label each route has in metrics.
//!
//! Routes that belong to mechanisms which this node does not have yet are in the table all the same. They answer
//! `501` with a text that names the mechanism, after header guard and method check like any other: a client can tell
//! them from a wrong address (`404`), and does not retry them.

use std::borrow::Cow;

use hyper::Method;
use narad_shards::rt::Queue;

use super::config::Surface;
use super::query;

/// One method on one path. The discriminant is the index of the route's series in `metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Healthz,
    Readyz,
    Metrics,
    CreateTopic,
    ListTopics,
    GetTopic,
    AlterTopic,
    DeleteTopic,
    GetSchema,
    Attach,
    ListChildren,
    Detach,
    ChildVerb,
    Produce,
    ProduceBatch,
    Consume,
    Ack,
    NodeShards,
    ListMembers,
    ListMoves,
    ForgetMember,
    Users,
    Cluster,
    Remotes,
}

impl Route {
    pub const COUNT: usize = Route::Remotes as usize + 1;

    /// Consumers have a share of the core of their own, so that no amount of produce starves them.
    pub fn queue(self) -> Queue {
        match self {
            Route::Consume | Route::Ack => Queue::Consume,
            _ => Queue::Foreground,
        }
    }

    /// The route as metrics name it: a closed set (lesson N45).
    pub const LABELS: [&'static str; Route::COUNT] = [
        "GET /healthz",
        "GET /readyz",
        "GET /metrics",
        "POST /v1/topics",
        "GET /v1/topics",
        "GET /v1/topics/{topic}",
        "PATCH /v1/topics/{topic}",
        "DELETE /v1/topics/{topic}",
        "GET /v1/topics/{topic}/schema",
        "POST /v1/topics/{topic}/children",
        "GET /v1/topics/{topic}/children",
        "DELETE /v1/topics/{topic}/children/{child}",
        "POST /v1/topics/{topic}/children/{child}/{verb}",
        "POST /v1/topics/{topic}/produce",
        "POST /v1/topics/{topic}/produce/batch",
        "GET /v1/topics/{topic}/consume",
        "POST /v1/topics/{topic}/ack",
        "GET /v1/node/shards",
        "GET /v1/cluster/members",
        "GET /v1/cluster/moves",
        "POST /v1/cluster/members/{id}/forget",
        "/v1/users",
        "/v1/cluster",
        "/v1/remotes",
    ];

    /// Routes whose cost depends on the shard that the client's connection is on.
    pub fn carries_messages(self) -> bool {
        matches!(self, Route::Produce | Route::ProduceBatch | Route::Consume | Route::Ack)
    }

    /// What a route without a handler answers with `501`: what it is that this node does not have.
    pub const fn not_built(self) -> &'static str {
        match self {
            Route::GetSchema => "schemas are not available on this node yet",
            Route::Attach => "fan-out children are not available on this node yet",
            Route::ChildVerb => "remote children are not available on this node",
            Route::Users => "users are not available on this node yet",
            Route::Cluster => "cluster management is not available on this node yet",
            Route::Remotes => "remotes are not available on this node",
            _ => "this route is not available on this node yet",
        }
    }
}

/// A path of the table, with its accepted methods.
struct Path {
    /// What `Allow` says; `GET` brings `HEAD` with it.
    allow: &'static str,
    routes: &'static [(Method, Route)],
}

macro_rules! path {
    ($allow:literal, $($method:ident => $route:ident),+) => {
        Path { allow: $allow, routes: &[$((Method::$method, Route::$route)),+] }
    };
}

static HEALTHZ: Path = path!("GET, HEAD", GET => Healthz);
static READYZ: Path = path!("GET, HEAD", GET => Readyz);
static METRICS: Path = path!("GET, HEAD", GET => Metrics);
static TOPICS: Path = path!("GET, HEAD, POST", GET => ListTopics, POST => CreateTopic);
static TOPIC: Path = path!("DELETE, GET, HEAD, PATCH", GET => GetTopic, PATCH => AlterTopic, DELETE => DeleteTopic);
static SCHEMA: Path = path!("GET, HEAD", GET => GetSchema);
static CHILDREN: Path = path!("GET, HEAD, POST", GET => ListChildren, POST => Attach);
static CHILD: Path = path!("DELETE", DELETE => Detach);
static CHILD_VERB: Path = path!("POST", POST => ChildVerb);
static PRODUCE: Path = path!("POST", POST => Produce);
static PRODUCE_BATCH: Path = path!("POST", POST => ProduceBatch);
static CONSUME: Path = path!("GET, HEAD", GET => Consume);
static ACK: Path = path!("POST", POST => Ack);
static NODE_SHARDS: Path = path!("GET, HEAD", GET => NodeShards);
static USERS: Path = path!("GET, HEAD, POST", GET => Users, POST => Users);
static USER: Path = path!("DELETE, GET, HEAD", GET => Users, DELETE => Users);
static USER_PART: Path = path!("PUT", PUT => Users);
static MEMBERS: Path = path!("GET, HEAD", GET => ListMembers);
static FORGET: Path = path!("POST", POST => ForgetMember);
static MOVES: Path = path!("GET, HEAD", GET => ListMoves);
static DECOMMISSION: Path = path!("DELETE, POST", POST => Cluster, DELETE => Cluster);
static CLUSTER_POST: Path = path!("POST", POST => Cluster);
static REMOTES: Path = path!("GET, HEAD, POST", GET => Remotes, POST => Remotes);
static REMOTE: Path = path!("DELETE, GET, HEAD, PATCH", GET => Remotes, PATCH => Remotes, DELETE => Remotes);
static REMOTE_POST: Path = path!("POST", POST => Remotes);

/// What a method and a path come to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found<'p> {
    Route {
        route: Route,
        /// The percent-decoded `{topic}`, or `{id}` of a member; empty on routes without one. Bytes that are not
        /// UTF-8 are replaced, which no name contains.
        topic: Cow<'p, str>,
    },
    /// `404`
    Nothing,
    /// `405`, with `Allow`.
    OtherMethods { allow: &'static str },
    /// `400`: a broken escape.
    Malformed,
}

const SEGMENTS_MAX: usize = 7;

pub(crate) fn find<'p>(method: &Method, path: &'p str, surface: Surface) -> Found<'p> {
    let Some(path) = path.strip_prefix('/') else { return Found::Nothing };
    let mut raw: [&[u8]; SEGMENTS_MAX] = [&[]; SEGMENTS_MAX];
    let mut count = 0;
    for segment in path.as_bytes().split(|byte| *byte == b'/') {
        if count == SEGMENTS_MAX {
            return Found::Nothing;
        }
        raw[count] = segment;
        count += 1;
    }
    let raw = &raw[..count];
    if !path.as_bytes().contains(&b'%') {
        return look_up(method, raw, surface, |at| String::from_utf8_lossy(raw[at]));
    }
    let mut decoded = Vec::with_capacity(count);
    for segment in raw {
        let Some(segment) = query::decode(segment, false) else { return Found::Malformed };
        if segment.is_empty() {
            return Found::Nothing;
        }
        decoded.push(segment);
    }
    let segments: Vec<&[u8]> = decoded.iter().map(|segment| &**segment).collect();
    look_up(method, &segments, surface, |at| Cow::Owned(String::from_utf8_lossy(segments[at]).into_owned()))
}

/// `named` gives a segment as text.
fn look_up<'p>(
    method: &Method,
    segments: &[&[u8]],
    surface: Surface,
    named: impl FnOnce(usize) -> Cow<'p, str>,
) -> Found<'p> {
    // Neither a doubled nor a trailing slash is redirected: clients repeat no body on a redirect.
    if segments.iter().any(|segment| segment.is_empty()) {
        return Found::Nothing;
    }
    let api = matches!(surface, Surface::Api { .. });
    let found = match segments {
        [b"healthz"] => &HEALTHZ,
        [b"readyz"] => &READYZ,
        [b"metrics"] if surface != (Surface::Api { metrics: false }) => &METRICS,
        [b"v1", rest @ ..] if api => match rest {
            [b"topics"] => &TOPICS,
            [b"topics", _] => &TOPIC,
            [b"topics", _, b"produce"] => &PRODUCE,
            [b"topics", _, b"produce", b"batch"] => &PRODUCE_BATCH,
            [b"topics", _, b"consume"] => &CONSUME,
            [b"topics", _, b"ack"] => &ACK,
            [b"topics", _, b"schema"] => &SCHEMA,
            [b"topics", _, b"children"] => &CHILDREN,
            [b"topics", _, b"children", _] => &CHILD,
            [b"topics", _, b"children", _, b"pause" | b"resume" | b"skip"] => &CHILD_VERB,
            [b"node", b"shards"] => &NODE_SHARDS,
            [b"users"] => &USERS,
            [b"users", _] => &USER,
            [b"users", _, b"grants" | b"password"] => &USER_PART,
            [b"cluster", b"members"] => &MEMBERS,
            [b"cluster", b"moves"] => &MOVES,
            [b"cluster", b"members", _, b"decommission"] => &DECOMMISSION,
            [b"cluster", b"members", _, b"forget"] => &FORGET,
            [b"cluster", b"moves", _, _, b"abort"] => &CLUSTER_POST,
            [b"cluster", b"reencrypt-remotes"] => &REMOTE_POST,
            [b"remotes"] => &REMOTES,
            [b"remotes", _] => &REMOTE,
            [b"remotes", _, b"test"] => &REMOTE_POST,
            _ => return Found::Nothing,
        },
        _ => return Found::Nothing,
    };
    let served = |wanted: &Method| method == wanted || (*method == Method::HEAD && *wanted == Method::GET);
    let Some((_, route)) = found.routes.iter().find(|(wanted, _)| served(wanted)) else {
        return Found::OtherMethods { allow: found.allow };
    };
    let at = if *route == Route::ForgetMember { 3 } else { 2 };
    let topic = if segments.len() > at { named(at) } else { Cow::Borrowed("") };
    Found::Route { route: *route, topic }
}

#[cfg(test)]
mod tests {
    use super::*;

    const API: Surface = Surface::Api { metrics: true };

    #[test]
    fn paths_and_methods() {
        let route = |route, topic: &'static str| Found::Route { route, topic: topic.into() };
        let allow = |allow| Found::OtherMethods { allow };
        for (method, path, found) in [
            ("GET", "/healthz", route(Route::Healthz, "")),
            ("HEAD", "/readyz", route(Route::Readyz, "")),
            ("POST", "/metrics", allow("GET, HEAD")),
            ("GET", "/v1/topics", route(Route::ListTopics, "")),
            ("POST", "/v1/topics", route(Route::CreateTopic, "")),
            ("GET", "/v1/topics/", Found::Nothing),
            ("GET", "/v1//topics", Found::Nothing),
            ("GET", "/v1/topics/a", route(Route::GetTopic, "a")),
            ("PUT", "/v1/topics/a", allow("DELETE, GET, HEAD, PATCH")),
            ("POST", "/v1/topics/a%2eb/produce", route(Route::Produce, "a.b")),
            ("POST", "/v1/topics/a%2Fproduce/ack", route(Route::Ack, "a/produce")),
            ("POST", "/v1/%74opics/a+b/ack", route(Route::Ack, "a+b")),
            ("POST", "/v1/topics/%ff/ack", route(Route::Ack, "\u{fffd}")),
            ("POST", "/v1/topics/%f/ack", Found::Malformed),
            ("GET", "/v1/topics/a/produce", allow("POST")),
            ("POST", "/v1/topics/a/produce/batch", route(Route::ProduceBatch, "a")),
            ("POST", "/v1/topics/a/produce/batches", Found::Nothing),
            ("HEAD", "/v1/topics/a/consume", route(Route::Consume, "a")),
            ("OPTIONS", "/v1/topics/a/consume", allow("GET, HEAD")),
            ("DELETE", "/v1/topics/a/children/b", route(Route::Detach, "a")),
            ("POST", "/v1/topics/a/children/b/skip", route(Route::ChildVerb, "a")),
            ("HEAD", "/v1/node/shards", route(Route::NodeShards, "shards")),
            ("POST", "/v1/node/shards", allow("GET, HEAD")),
            ("GET", "/v1/node", Found::Nothing),
            ("GET", "/v1/cluster/members", route(Route::ListMembers, "members")),
            ("POST", "/v1/cluster/members/n%2d4/forget", route(Route::ForgetMember, "n-4")),
            ("GET", "/v1/cluster/members/n4/forget", allow("POST")),
            ("GET", "/v1/cluster/moves", route(Route::ListMoves, "moves")),
            ("GET", "/v1/x/y/z/1/2/3/4/5/6/7/8", Found::Nothing),
            ("GET", "/", Found::Nothing),
            ("GET", "*", Found::Nothing),
            ("GET", "/V1/topics", Found::Nothing),
        ] {
            let method = Method::from_bytes(method.as_bytes()).expect("a token");
            assert_eq!(find(&method, path, API), found, "{method} {path}");
        }
    }

    #[test]
    fn n50_metrics_leave_the_api_port_and_the_api_is_not_on_the_probe_port() {
        let find = |path, surface| find(&Method::GET, path, surface);
        assert_eq!(find("/metrics", Surface::Api { metrics: false }), Found::Nothing);
        assert!(matches!(find("/readyz", Surface::Api { metrics: false }), Found::Route { .. }));
        assert!(matches!(find("/metrics", Surface::Probes), Found::Route { .. }));
        assert_eq!(find("/v1/topics", Surface::Probes), Found::Nothing);
    }
}
