//! Certificates, and how quiche is set up.

use std::net::SocketAddr;
use std::time::Duration;

use boring::asn1::Asn1Time;
use boring::bn::BigNum;
use boring::ec::{EcGroup, EcKey};
use boring::error::ErrorStack;
use boring::hash::MessageDigest;
use boring::nid::Nid;
use boring::pkey::{PKey, Private};
use boring::ssl::{SslContextBuilder, SslFiletype, SslMethod, SslOptions, SslRef, SslSessionCacheMode, SslVerifyMode};
use boring::x509::extension::SubjectAlternativeName;
use boring::x509::{X509Name, X509};
use quiche::ConnectionId;

use super::buffers::Quic;
use super::{PeerSettings, TlsFiles, DATAGRAM_BYTES_MAX, DATAGRAM_BYTES_MIN, SHARED_NAME};

/// Changes only when the frame header does (E42).
const PROTOCOL: &[u8] = b"narad-peer/1";
/// Stream 0 and one for each lane.
const STREAMS: u64 = 1 + narad_shards::wire::Lane::ALL.len() as u64;
/// Peers share a fast network: that much leaves before the first acknowledgement.
const INITIAL_WINDOW_BYTES: usize = 256 << 10;

/// What a round trip is taken for until it was measured: a dial must survive the loss of its first packets.
const INITIAL_RTT: Duration = Duration::from_millis(50);

/// Makes connections. Replaced as a whole when certificates change; connections that are up keep what they began with.
pub(super) struct Tls {
    config: quiche::Config,
    checks_peers: bool,
}

/// `what`: certificate, private key or authorities, each with its setting.
pub(super) fn named((what, path): (&str, &std::path::Path), error: impl std::fmt::Display) -> String {
    let setting = match what {
        "certificate" => "security.cluster_tls_cert_file",
        "private key" => "security.cluster_tls_key_file",
        _ => "security.cluster_tls_ca_file",
    };
    format!("{setting}: cannot use {} as the cluster's {what}: {error}", path.display())
}

fn self_signed() -> Result<(X509, PKey<Private>), ErrorStack> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1)?;
    let key = PKey::from_ec_key(EcKey::generate(&group)?)?;
    let mut name = X509Name::builder()?;
    name.append_entry_by_text("CN", SHARED_NAME)?;
    let name = name.build();
    let mut builder = X509::builder()?;
    builder.set_version(2)?;
    let mut serial = [0; 16];
    boring::rand::rand_bytes(&mut serial)?;
    serial[0] &= 0x7f;
    let serial = BigNum::from_slice(&serial)?.to_asn1_integer()?;
    builder.set_serial_number(&serial)?;
    builder.set_subject_name(&name)?;
    builder.set_issuer_name(&name)?;
    // Nobody looks at the dates: the proof of the secret is the authentication.
    let (before, after) = (Asn1Time::days_from_now(0)?, Asn1Time::days_from_now(3650)?);
    builder.set_not_before(&before)?;
    builder.set_not_after(&after)?;
    builder.set_pubkey(&key)?;
    let names = SubjectAlternativeName::new().dns(SHARED_NAME).build(&builder.x509v3_context(None, None))?;
    builder.append_extension(&names)?;
    builder.sign(&key, MessageDigest::sha256())?;
    Ok((builder.build(), key))
}

fn ephemeral() -> Result<SslContextBuilder, ErrorStack> {
    let mut builder = SslContextBuilder::new(SslMethod::tls())?;
    let (certificate, key) = self_signed()?;
    builder.set_certificate(&certificate)?;
    builder.set_private_key(&key)?;
    builder.set_verify(SslVerifyMode::NONE);
    Ok(builder)
}

fn from_files(files: &TlsFiles) -> Result<SslContextBuilder, String> {
    let mut builder = SslContextBuilder::new(SslMethod::tls()).map_err(|error| error.to_string())?;
    let certificate = builder.set_certificate_chain_file(&files.certificate);
    certificate.map_err(|error| named(("certificate", &files.certificate), error))?;
    let key = builder.set_private_key_file(&files.key, SslFiletype::PEM);
    key.map_err(|error| named(("private key", &files.key), error))?;
    builder.check_private_key().map_err(|error| named(("private key", &files.key), error))?;
    builder.set_ca_file(&files.authorities).map_err(|error| named(("authorities", &files.authorities), error))?;
    // Never quiche's own switch: its server would still admit whoever shows nothing.
    builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
    Ok(builder)
}

impl Tls {
    pub fn new(settings: &PeerSettings) -> Result<Tls, String> {
        let mut builder = match &settings.tls {
            Some(files) => from_files(files)?,
            None => ephemeral().map_err(|error| format!("cannot make a certificate for the peer plane: {error}"))?,
        };
        builder.set_options(SslOptions::NO_TICKET);
        builder.set_session_cache_mode(SslSessionCacheMode::OFF);
        let config = configure(builder, settings).map_err(|error| format!("cannot set up QUIC: {error}"))?;
        Ok(Tls { config, checks_peers: settings.tls.is_some() })
    }

    fn check_name(&self, quic: &mut Quic) -> Result<(), quiche::Error> {
        if !self.checks_peers {
            return Ok(());
        }
        let session = AsMut::<SslRef>::as_mut(quic);
        session.verify_param_mut().set_host(SHARED_NAME).map_err(|_| quiche::Error::TlsFail)
    }

    pub fn dial(&mut self, id: &[u8], local: SocketAddr, peer: SocketAddr) -> Result<Quic, quiche::Error> {
        let id = ConnectionId::from_ref(id);
        let config = &mut self.config;
        let mut quic = quiche::connect_with_buffer_factory(Some(SHARED_NAME), &id, local, peer, config)?;
        self.check_name(&mut quic)?;
        Ok(quic)
    }

    /// `original`: what the dialler had asked for before a Retry. `reset_token`: what a reset of this connection shows.
    pub fn accept(
        &mut self,
        id: &[u8],
        original: Option<&[u8]>,
        reset_token: u128,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<Quic, quiche::Error> {
        let id = ConnectionId::from_ref(id);
        let original = original.map(ConnectionId::from_ref);
        self.config.set_stateless_reset_token(Some(reset_token));
        let mut quic = quiche::accept_with_buf_factory(&id, original.as_ref(), local, peer, &mut self.config)?;
        self.check_name(&mut quic)?;
        Ok(quic)
    }
}

fn configure(builder: SslContextBuilder, settings: &PeerSettings) -> Result<quiche::Config, quiche::Error> {
    let mut config = quiche::Config::with_boring_ssl_ctx_builder(quiche::PROTOCOL_VERSION, builder)?;
    config.set_application_protos(&[PROTOCOL])?;
    config.set_max_idle_timeout(settings.idle_timeout.as_millis() as u64);
    config.set_max_recv_udp_payload_size(64 << 10);
    let datagram_bytes = settings.datagram_bytes.clamp(DATAGRAM_BYTES_MIN, DATAGRAM_BYTES_MAX);
    config.set_max_send_udp_payload_size(datagram_bytes);
    config.set_initial_rtt(INITIAL_RTT);
    config.set_initial_max_data(settings.connection_window_bytes);
    config.set_initial_max_stream_data_bidi_local(settings.stream_window_bytes);
    config.set_initial_max_stream_data_bidi_remote(settings.stream_window_bytes);
    config.set_max_stream_window(settings.stream_window_bytes_max);
    config.set_max_connection_window(settings.connection_window_bytes_max);
    config.set_initial_max_streams_bidi(STREAMS);
    config.set_initial_max_streams_uni(0);
    config.set_disable_active_migration(true);
    config.set_initial_congestion_window_packets((INITIAL_WINDOW_BYTES / datagram_bytes).max(10));
    // Bursts are bounded by what one send takes, and by the window.
    config.enable_pacing(false);
    config.grease(false);
    Ok(config)
}
