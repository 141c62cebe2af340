"""TLS from a trainer to an engine: contexts for both ends, and failed handshakes explained in plain words."""

from __future__ import annotations

import ssl

from weightcast.errors import ConfigError

# OpenSSL's numbers (X509_V_ERR_...), for which Python has no names.
_DISTRUST = (
    *("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "ALERT_UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN"),
    *("CERTIFICATE_EXPIRED", "UNSUPPORTED_CERTIFICATE", "UNEXPECTED_EOF"),
)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER")
_NOT_YET_VALID, _EXPIRED, _WRONG_NAME, _WRONG_ADDRESS = 9, 10, 62, 64


def client_context(*, ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """A context that checks the server's certificate and host name and shows a client certificate if asked.

    It raises ConfigError if a file is unreadable, holds no certificate, or key and certificate do not match.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"CA file {ca_file}: {_why(error)}", hint="use a file of certificates in PEM") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # which not every build of Python does
    if cert_file is not None:
        _show(context, "client certificate", cert_file, key_file)
    return context


def server_context(*, cert_file: str, key_file: str | None, client_ca_file: str | None) -> ssl.SSLContext:
    """A context that shows a certificate, and with a client CA requires one; raises as ``client_context``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _show(context, "certificate", cert_file, key_file)
    if client_ca_file is not None:
        try:
            context.load_verify_locations(client_ca_file)
        except OSError as error:
            raise ConfigError(
                f"client CA {client_ca_file}: {_why(error)}", hint="use a file of certificates in PEM"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _show(context: ssl.SSLContext, what: str, cert_file: str, key_file: str | None) -> None:
    try:
        # OpenSSL would otherwise ask for the password on the terminal.
        context.load_cert_chain(cert_file, key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{what} {cert_file}{f' with key {key_file}' if key_file else ''}: {_why(error)}",
            hint="both in PEM, belonging together, the key without a password",
        ) from error


def tls_trouble(error: BaseException, *, has_certificate: bool) -> tuple[str, str] | None:
    """Explains a client's TLS error: the words and a hint, or None if the error is about something else."""
    found = _ssl_error(error)
    if found is None:
        return None
    if isinstance(found, ssl.SSLCertVerificationError):
        return _verification(found)
    reason = (found.reason or "").upper()
    if any(word in reason for word in _DISTRUST):
        return client_distrusted(has_certificate=has_certificate)
    if any(word in reason for word in _NO_TLS):
        return "it does not answer in TLS", "write http:// in its URL, or start it with --tls-cert"
    return f"TLS failed: {found.reason or found}", "do both ends have a protocol version and a cipher in common?"


def client_distrusted(*, has_certificate: bool) -> tuple[str, str]:
    """Explains that the server accepts no client without a certificate, or not this one: the words and a hint."""
    if not has_certificate:
        return "it asks for a client certificate", "pass cert_file and key_file, or --cert-file and --key-file"
    return (
        "it does not accept the client certificate",
        "use one that has not expired, of the authority that the engine was started with (--tls-client-ca)",
    )


def _verification(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    match error.verify_code:
        case code if code == _EXPIRED:
            return "its certificate has expired", "renew it (--tls-cert of the engine) and check this machine's clock"
        case code if code == _NOT_YET_VALID:
            return "its certificate is not valid yet", "check the clocks of both machines"
        case code if code in (_WRONG_NAME, _WRONG_ADDRESS):
            return (
                f"its certificate is for another host: {error.verify_message}",
                "use a host name or address that the certificate names, or issue one that names this host",
            )
        case _:
            return (
                f"its certificate is not trusted here: {error.verify_message}",
                "pass the authority that signed it as ca_file, or --ca-file",
            )


def _ssl_error(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None and not (isinstance(error, ssl.SSLError) and hasattr(error, "library")):
        error = error.__cause__ or error.__context__
    return error


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason.lower().replace("_", " ") if error.reason else "not what it should be"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
