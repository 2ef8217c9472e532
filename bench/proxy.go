package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
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
	p.running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // it was closed
			}
			p.running.Go(func() { _ = p.join(ctx, client.(*net.TCPConn)) }) // the client sees that it ended
		}
	})
	return p, nil
}

// close breaks all connections, and returns when nothing is left of them.
func (p *proxy) close() {
	_ = p.listener.Close()
	p.stop()
	p.running.Wait()
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
	ways := [][2]*net.TCPConn{{server, client}, {client, server}}
	return lab.Each(len(ways), func(i int) error { return p.pass(ways[i][0], ways[i][1]) })
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
