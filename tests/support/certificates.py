"""An authority of our own, and what it signs; made new for each use, valid for a day."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates; its own lies at `ca_file`."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {name}")])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca_file = directory / f"{name}.pem"
        self.ca_file.write_bytes(_pem(self._sign(self._name, self._key, ca=True)))

    def issue(self, name: str, *hosts: str) -> Path:
        """A PEM file with a certificate for these hosts (DNS names or addresses) and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, hosts=hosts)
        path = self._directory / f"{name}.pem"
        path.write_bytes(
            _pem(certificate)
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return path

    def _sign(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, hosts: tuple[str, ...] = (), ca: bool = False
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
