"""The API process: HTTP in front of one engine process."""
