"""m3-serve: an OpenAI-compatible server over HTTP. Needs the extra [server] of the package."""
