"""What ``status`` shows a person."""

from __future__ import annotations

import io

from rich.console import Console

from p2p_trainer.status import status_table


def test_the_table_tells_everything_in_80_columns() -> None:
    peers = [
        {
            "peer_id": "QmWVeKjMNmruvaj17LFsW8FH6iQTBxUQRyYUwpaWQuMNkc",
            "status": "training",
            "samples_per_second": 1234.5,
            "versions": [9998, 10001],
            "processed_samples": 1_234_567,
            "credited_samples": 1_234_321.5,
            "share": 1.0,
            "device": "NVIDIA GeForce RTX 3090",
        },
        {
            "peer_id": "QmNiVTP3dRj3jiyqrZcL7b8Ko5HqRGwx8djye8p4R29WvL",
            "status": "serving",
            "samples_per_second": 0.0,
            "versions": [],
            "processed_samples": 0,
            "credited_samples": 0.0,
            "share": 0.0,
            "device": "",
        },
    ]
    report = {"run_id": "digits-58142c73b6c22e86", "training": 1, "samples_per_second": 1234.5, "peers": peers}
    output = io.StringIO()
    Console(file=output, width=80).print(status_table(report))
    lines = output.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    heading = next(line for line in lines if "credited" in line)
    assert heading.split() == ["peer", "status", "samples/s", "version", "processed", "credited", "share", "device"]
    assert any(
        line.split()[:7] == ["…QuMNkc", "training", "1234.5", "9998-10001", "1234567", "1234322", "100%"]
        for line in lines
    )
    assert "NVIDIAGeForceRTX3090" in "".join(line[60:].strip() for line in lines).replace(" ", "")
