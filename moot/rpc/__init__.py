"""The wire: conversion between messages and core types, links, TLS, interceptors, server."""
