"""Measures running servers from outside, and Ropewalk's parts from inside."""
