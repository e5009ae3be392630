"""Processes that call code of users and of responses: supervised, limited in time and memory."""
