"""Devices at home: each measures, says whether it is online, and leaves a will for the case that it is lost.

    pixiu up                                          # in another terminal
    python examples/iot/devices.py                    # three devices for ten seconds
    python examples/iot/devices.py readings.csv.gz    # a recording, as fast as it is read

A recording has the columns ts_ms, device, topic, co, humidity, light, lpg, motion, smoke and temp.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import time
from collections.abc import Iterator
from itertools import islice

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

Reading = dict[str, float]
READINGS_PER_S = 2.0


class Device:
    """The MQTT connection of one device."""

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name = name
        self._client = client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=MQTTProtocolVersion.MQTTv5)
        client.username_pw_set(name)
        client.will_set(f"devices/{name}/status", b"offline", qos=1, retain=True)
        client.connect(host, port, keepalive=20)
        client.loop_start()
        client.publish(f"devices/{name}/status", b"online", qos=1, retain=True).wait_for_publish(10)

    def measured(self, reading: Reading) -> None:
        """Publish what was measured."""
        self._client.publish(f"devices/{self.name}/telemetry", json.dumps(reading), qos=1).wait_for_publish(10)

    def close(self) -> None:
        """Say that it goes, and go: no will is left."""
        self._client.publish(f"devices/{self.name}/status", b"offline", qos=1, retain=True).wait_for_publish(10)
        self._client.disconnect()
        self._client.loop_stop()


def invented(devices: int, seconds: float) -> Iterator[tuple[str, Reading]]:
    """Readings of devices whose temperature wanders, and which see smoke now and then."""
    chance = random.Random(1)
    temperatures = [20.0 + chance.random() for _ in range(devices)]
    for number in range(round(seconds * READINGS_PER_S)):
        for device in range(devices):
            temperatures[device] += chance.uniform(-0.3, 0.3)
            smoke = 0.04 if (number + device) % 7 == 6 else 0.02
            yield f"device-{device + 1}", {"temp": round(temperatures[device], 1), "humidity": 50.0, "smoke": smoke}
        time.sleep(1 / READINGS_PER_S)


def recorded(path: str) -> Iterator[tuple[str, Reading]]:
    """Readings of a recording."""
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        for row in csv.DictReader(file):
            yield row["device"], {name: float(row[name]) for name in ("temp", "humidity", "smoke", "co")}


def main() -> None:
    """Publish readings until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recording", nargs="?")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=1883)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--readings", type=int, help="at most this many")
    asked = parser.parse_args()
    readings = recorded(asked.recording) if asked.recording else invented(asked.devices, asked.seconds)
    devices: dict[str, Device] = {}
    count = 0
    for name, reading in islice(readings, asked.readings):
        if name not in devices:
            devices[name] = Device(name, asked.host, asked.port)
        devices[name].measured(reading)
        count += 1
    for device in devices.values():
        device.close()
    print(f"{count} readings of {len(devices)} devices")


if __name__ == "__main__":
    main()
