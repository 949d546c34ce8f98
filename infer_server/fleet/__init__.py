"""Capacity planning: how many servers hold a rate and a latency, by simulation of a fleet."""
