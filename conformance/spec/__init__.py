"""The specification: a folder for each profile, a module for each chapter.

A rule is written on the case that checks it. What has no case helps the chapters beside it.
"""
