"""The wire: conversion between messages and core types, links, frames, server and interceptors."""
