"""Tokenizers: conversion of text to token ids and of token ids to text."""
