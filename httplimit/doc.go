// Package httplimit limits HTTP requests by package ratelimit's limits: a [Middleware]
// for servers, and a [Transport] for clients.
package httplimit
