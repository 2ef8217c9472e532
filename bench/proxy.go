package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// proxy is a network before a server: it passes on data, either way, half a round trip later.
// Data under way does not delay later data, so its bandwidth is that of the loopback interface.
// Connecting is not delayed: programs keep their connections.
type proxy struct {
	target   string
	oneWay   time.Duration
	listener net.Listener
	stop     context.CancelFunc
	running  sync.WaitGroup
}

const (
	mostRead = 32 << 10 // bytes that are passed on at once
	mostSent = 1024     // of these that can be under way, each way of a connection
)

// startProxy returns a proxy that listens for connections to target, and makes
// each round trip longer by network: by half of it each way.
func startProxy(target string, network time.Duration) (*proxy, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listening before %s: %w", target, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &proxy{target: target, oneWay: network / 2, listener: listener, stop: cancel}
	p.running.Go(func() { p.serve(ctx) })
	return p, nil
}

func (p *proxy) address() string { return p.listener.Addr().String() }

// close breaks all connections, and returns when nothing is left of them.
func (p *proxy) close() error {
	err := p.listener.Close()
	p.stop()
	p.running.Wait()
	return err
}

func (p *proxy) serve(ctx context.Context) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // it was closed
		}
		p.running.Go(func() { _ = p.join(ctx, client.(*net.TCPConn)) }) // the client sees that it ended
	}
}

// join passes on between a client and a connection of its own to the server,
// until both have ended or one is broken.
func (p *proxy) join(ctx context.Context, client *net.TCPConn) error {
	defer client.Close()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", p.target)
	if err != nil {
		return err
	}
	defer conn.Close()
	server := conn.(*net.TCPConn)
	defer context.AfterFunc(ctx, func() { client.Close(); server.Close() })()
	var faults [2]error
	var both sync.WaitGroup
	both.Go(func() { faults[0] = p.pass(server, client) })
	both.Go(func() { faults[1] = p.pass(client, server) })
	both.Wait()
	return errors.Join(faults[:]...)
}

// chunk is bytes on their way. Without any it is the end of all.
type chunk struct {
	bytes []byte
	due   time.Time
}

// pass passes on all that src sends, and its end.
func (p *proxy) pass(dst, src *net.TCPConn) error {
	sent := make(chan chunk, mostSent)
	go p.receive(sent, src)
	err := deliver(dst, sent)
	if err != nil {
		src.Close()
		for range sent { // until the receiver has seen it
		}
	}
	return err
}

// receive reads until src ends or is broken, whenever it can.
func (p *proxy) receive(sent chan<- chunk, src *net.TCPConn) {
	defer close(sent)
	buffer := make([]byte, mostRead)
	for {
		n, err := src.Read(buffer)
		due := time.Now().Add(p.oneWay)
		if n > 0 {
			sent <- chunk{bytes.Clone(buffer[:n]), due}
		}
		if err != nil {
			sent <- chunk{nil, due}
			return
		}
	}
}

// deliver writes each chunk when it is due.
func deliver(dst *net.TCPConn, sent <-chan chunk) error {
	t, err := newTimer()
	if err != nil {
		return err
	}
	defer t.close()
	for c := range sent {
		if err := t.sleep(time.Until(c.due)); err != nil {
			return err
		}
		if c.bytes == nil {
			return dst.CloseWrite()
		}
		if _, err := dst.Write(c.bytes); err != nil {
			return err
		}
	}
	return nil
}
