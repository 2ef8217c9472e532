// Package relay passes on the messages of clients and a PostgreSQL server, as a pooler or a
// network does, until it is made to do harm. It is for tests.
package relay

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

// Fate is the treatment of a request or an answer.
type Fate int

const (
	Pass      Fate = iota // to the other side
	Silence               // it is lost, and so is all that follows on the connection
	Fatal                 // of an answer: the client is told that the connection to the server was lost
	Cut                   // it is lost, and the connection ends
	CutWithin             // half of it arrives, and the connection ends
	CutAfter              // it arrives, and the connection ends
	Slow                  // its first bytes arrive one by one
)

// Judge returns the fate of the n-th request or answer.
type Judge func(n int, message []byte) Fate

// Relay listens for clients and connects each to the server. It is safe for concurrent
// use.
type Relay struct {
	listener net.Listener

	mu                sync.Mutex
	network, server   string
	requests, answers judged
	conns             []net.Conn
}

// judged is a judge, and the number of messages that it has judged.
type judged struct {
	judge Judge
	n     int
}

// New listens on the loopback interface for connections to a server.
func New(network, server string) (*Relay, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &Relay{listener: listener, network: network, server: server}
	go r.accept()
	return r, nil
}

// Address returns where clients connect to.
func (r *Relay) Address() *net.TCPAddr { return r.listener.Addr().(*net.TCPAddr) }

// Interfere has requests and answers judged, and counts them, from now on. A nil Judge
// passes all.
func (r *Relay) Interfere(requests, answers Judge) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests, r.answers = judged{judge: requests}, judged{judge: answers}
}

// Counted returns how many requests and answers there were since Interfere.
func (r *Relay) Counted() (requests, answers int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.requests.n, r.answers.n
}

// Redirect has new connections go to another server.
func (r *Relay) Redirect(network, server string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.network, r.server = network, server
}

// Close ends all connections.
func (r *Relay) Close() {
	r.listener.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range r.conns {
		conn.Close()
	}
}

func (r *Relay) accept() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		network, address := r.network, r.server
		r.mu.Unlock()
		server, err := net.Dial(network, address)
		if err != nil {
			client.Close()
			continue
		}
		r.mu.Lock()
		r.conns = append(r.conns, client, server)
		r.mu.Unlock()
		l := &link{relay: r, client: client, server: server}
		go l.passRequests()
		go l.passAnswers()
	}
}

// link is a client's connection and that to the server for it.
type link struct {
	relay          *Relay
	client, server net.Conn
	silent         atomic.Bool
}

// end ends both connections, but after silence those stay open: nobody would hear of
// the end of a network.
func (l *link) end() {
	if !l.silent.Load() {
		l.client.Close()
		l.server.Close()
	}
}

// passRequests passes on the client's messages, each request as a whole.
func (l *link) passRequests() {
	defer l.end()
	reader := bufio.NewReader(l.client)
	request, err := readMessage(reader, 0) // the first has no type
	if err != nil || write(l.server, request) != nil {
		return
	}
	request = nil
	for {
		message, err := readMessage(reader, 1)
		if err != nil {
			return
		}
		request = append(request, message...)
		fate := Pass
		switch message[0] {
		case 'P', 'B', 'D', 'E', 'C': // Parse to Close: there is more to come
			continue
		case 'S', 'Q': // Sync, Query
			fate = l.relay.judge(&l.relay.requests, request)
		}
		if !l.pass(l.server, request, fate) {
			return
		}
		request = nil
	}
}

// passAnswers passes on the server's messages, each answer as a whole once the client has been
// let in.
func (l *link) passAnswers() {
	defer l.end()
	reader := bufio.NewReader(l.server)
	var answer []byte
	for letIn := false; ; {
		message, err := readMessage(reader, 1)
		if err != nil {
			return
		}
		answer = append(answer, message...)
		ready := message[0] == 'Z'
		if letIn && !ready || l.silent.Load() {
			continue
		}
		fate := Pass
		if letIn {
			if fate = l.relay.judge(&l.relay.answers, answer); fate == Fatal {
				answer = fatalError()
			}
		}
		letIn = letIn || ready
		if !l.pass(l.client, answer, fate) {
			return
		}
		answer = nil
	}
}

// pass passes a message on, or treats it by its fate; false if that was the last one.
func (l *link) pass(to net.Conn, message []byte, fate Fate) bool {
	if l.silent.Load() {
		return true
	}
	switch fate {
	case Silence:
		l.silent.Store(true)
		return true
	case Cut:
		return false
	case CutWithin:
		_ = write(to, message[:len(message)/2])
		return false
	case CutAfter:
		_ = write(to, message)
		return false
	case Slow:
		const first = 40
		for i := range min(first, len(message)) {
			if write(to, message[i:i+1]) != nil {
				return false
			}
			time.Sleep(time.Millisecond)
		}
		message = message[min(first, len(message)):]
	}
	return write(to, message) == nil
}

func write(to net.Conn, message []byte) error {
	_, err := to.Write(message)
	return err
}

// fatalError returns PgBouncer's message when it loses the server.
func fatalError() []byte {
	message, err := (&pgproto3.ErrorResponse{
		Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "08P01", Message: "server conn crashed?",
	}).Encode(nil)
	if err != nil {
		panic(err)
	}
	return message
}

// readMessage reads a message with its length after the first after bytes.
func readMessage(reader *bufio.Reader, after int) ([]byte, error) {
	head, err := reader.Peek(after + 4)
	if err != nil {
		return nil, err
	}
	message := make([]byte, after+int(binary.BigEndian.Uint32(head[after:])))
	_, err = io.ReadFull(reader, message)
	return message, err
}

func (r *Relay) judge(of *judged, message []byte) Fate {
	r.mu.Lock()
	of.n++
	n, judge := of.n, of.judge
	r.mu.Unlock()
	if judge == nil {
		return Pass
	}
	return judge(n, message)
}
