use super::tests_support::{from_environment, from_file};
use super::*;

const THREE: &str = "a@10.0.0.1:7943,b@10.0.0.2:7943,c@10.0.0.3:7943";
const SECRET: &str = "0123456789abcdef-not-shown";

/// A cluster that starts, with more variables over it.
fn cluster(more: &[(&str, &str)]) -> Result<Config, String> {
    let mut pairs = vec![
        ("NARAD_CLUSTER_PEERS", THREE),
        ("NARAD_CLUSTER_SECRET", SECRET),
        ("NARAD_SECURITY_ALLOW_PLAINTEXT_RAFT", "true"),
    ];
    pairs.retain(|(name, _)| !more.iter().any(|(other, _)| other == name));
    pairs.extend(more);
    from_environment(&pairs)
}

#[test]
fn peers_are_read_from_the_environment_and_the_file() {
    let environment = cluster(&[]).unwrap().cluster.peers;
    assert_eq!(environment.len(), 3);
    assert_eq!((environment[1].id.as_str(), environment[1].addr.to_string().as_str()), ("b", "10.0.0.2:7943"));
    let text = r#"{"cluster":{"peers":[{"id":"a","addr":"10.0.0.1:7943"},{"id":"b","addr":"10.0.0.2:7943"},
        {"id":"c","addr":"10.0.0.3:7943"}]},"security":{"enabled":false,"allow_insecure_cluster":true}}"#;
    assert_eq!(from_file("peers", text).unwrap().cluster.peers, environment);
}

#[test]
fn t20_a_peer_list_that_cannot_work_is_refused_by_key() {
    let cases = [
        ("a@10.0.0.1:1,b@10.0.0.2:1", "cluster.peers has 2 entries, at least 3 are needed"),
        ("a@10.0.0.1:1,a@10.0.0.2:1,c@10.0.0.3:1", "cluster.peers names \"a\" twice"),
        ("a@10.0.0.1:1,b@10.0.0.1:1,c@10.0.0.3:1", "cluster.peers has the address 10.0.0.1:1 twice"),
        ("a,b,c", "cluster.peers: \"a\" is not id@host:port"),
        ("a@:1,b@h:1,c@h:2", "cluster.peers: \":1\" is not an address that can be dialled"),
        ("a@0.0.0.0:1,b@h:1,c@h:2", "can be dialled"),
        ("a@h:0,b@h:1,c@h:2", "can be dialled"),
        ("a b@h:1,b@h:2,c@h:3", "cluster.peers: id \"a b\""),
        ("", ""),
    ];
    for (peers, expected) in cases {
        match cluster(&[("NARAD_CLUSTER_PEERS", peers)]) {
            Err(error) => assert!(error.contains(expected) && !error.contains('\n'), "{peers}: {error}"),
            Ok(config) => assert!(expected.is_empty() && config.cluster.peers.is_empty(), "{peers} was accepted"),
        }
    }
    for json in [r#"{"id":"a"}"#, r#"{"id":"a","addr":"h:1","more":1}"#, r#"{"id":1,"addr":"h:1"}"#, "7"] {
        let error = from_file("bad-peer", &format!(r#"{{"cluster":{{"peers":[{json}]}}}}"#)).unwrap_err();
        assert!(error.contains("cluster.peers: ") && error.contains("\"id\" and \"addr\""), "{json}: {error}");
    }
}

#[test]
fn t20_a_secured_cluster_needs_its_secret_and_says_what_it_does_without_certificates() {
    let error = cluster(&[("NARAD_CLUSTER_SECRET", "")]).unwrap_err();
    assert!(error.contains("NARAD_CLUSTER_SECRET is not set"), "{error}");
    let error = cluster(&[("NARAD_CLUSTER_SECRET", "short")]).unwrap_err();
    assert!(error.contains("NARAD_CLUSTER_SECRET: has 5 bytes, at least 16") && !error.contains("short"), "{error}");
    let error = cluster(&[("NARAD_SECURITY_ALLOW_PLAINTEXT_RAFT", "false")]).unwrap_err();
    assert!(error.contains("security.cluster_tls_cert_file") && error.contains("allow_plaintext_raft"), "{error}");
    let error = cluster(&[("NARAD_CLUSTER_TLS_CERT_FILE", "/c"), ("NARAD_CLUSTER_TLS_KEY_FILE", "/k")]).unwrap_err();
    assert!(error.contains("2 of 3 are set"), "{error}");
    let error = cluster(&[("NARAD_SECURITY_ENABLED", "false")]).unwrap_err();
    assert!(error.contains("security.allow_insecure_cluster must be true"), "{error}");
    let error = cluster(&[("NARAD_SECURITY_ALLOW_LEGACY_CLUSTER_AUTH", "true")]).unwrap_err();
    assert!(error.contains("allow_legacy_cluster_auth: true is refused"), "{error}");
    let open = cluster(&[
        ("NARAD_SECURITY_ENABLED", "false"),
        ("NARAD_SECURITY_ALLOW_INSECURE_CLUSTER", "true"),
        ("NARAD_CLUSTER_SECRET", ""),
    ]);
    assert!(open.unwrap().warnings.iter().any(|warning| warning.to_string().contains("the peer plane is open")));
}

#[test]
fn a_secret_is_never_shown() {
    let config = cluster(&[]).unwrap();
    assert!(config.cluster.secret.is_some());
    assert!(!format!("{config:?}").contains("not-shown"));
}

#[test]
fn k28_who_may_bootstrap() {
    let all = cluster(&[]).unwrap().cluster;
    assert!(all.may_bootstrap("a") && all.may_bootstrap("c") && !all.may_bootstrap("d"));
    let some = cluster(&[("NARAD_CLUSTER_INITIAL_MEMBERS", "a, b")]).unwrap().cluster;
    assert!(some.may_bootstrap("b") && !some.may_bootstrap("c"));
    assert!(from_environment(&[]).unwrap().cluster.may_bootstrap("anybody"), "a node without peers is its own cluster");
    let error = cluster(&[("NARAD_CLUSTER_INITIAL_MEMBERS", "a,x")]).unwrap_err();
    assert!(error.contains("cluster.initial_members names \"x\""), "{error}");
    let error = from_environment(&[("NARAD_CLUSTER_INITIAL_MEMBERS", "a")]).unwrap_err();
    assert!(error.contains("cluster.peers is not: set both"), "{error}");
}

#[test]
fn an_address_that_nobody_could_dial_is_refused() {
    let config = cluster(&[]).unwrap().cluster;
    assert_eq!(config.advertised("b").unwrap().to_string(), "10.0.0.2:7943");
    assert!(config.advertised("d").unwrap_err().contains("cluster.advertise_addr: this node (d) is not in"));
    let told = cluster(&[("NARAD_CLUSTER_ADVERTISE_ADDR", "broker-4:9000")]).unwrap().cluster;
    assert_eq!(told.advertised("d").unwrap().to_string(), "broker-4:9000");
    for nobody in [":9000", "0.0.0.0:9000", "[::]:9000", "[::ffff:0.0.0.0]:9000", "224.0.0.1:9000", "255.255.255.255:1"]
    {
        let error = cluster(&[("NARAD_CLUSTER_ADVERTISE_ADDR", nobody)]).unwrap_err();
        assert!(error.contains("can be dialled"), "{nobody}: {error}");
    }
    let alone = from_environment(&[]).unwrap().cluster;
    assert!(alone.advertised("a").unwrap_err().contains("local bind address is not advertisable"));
    let loopback = ListenAddress::parse("127.0.0.1:1").unwrap();
    assert_eq!(alone.bind_host(&loopback), "127.0.0.1");
    assert_eq!(alone.bind_host(&told.advertised("d").unwrap()), "");
}

#[test]
fn the_peer_plane_and_the_api_have_addresses_of_their_own() {
    let error = from_environment(&[("NARAD_HTTP_ADDR", "127.0.0.1:1"), ("NARAD_CLUSTER_ADDR", "127.0.0.1:1")]);
    assert!(error.unwrap_err().contains("cluster.addr (127.0.0.1:1) must differ from http.addr"));
    let config = load(&Sources { cluster_port: Some(9), ..Sources::default() }).unwrap();
    assert_eq!(config.cluster.addr.to_string(), ":9");
}
