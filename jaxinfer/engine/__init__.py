"""The engine: from requests on the host to steps on the device and back."""
