package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// network is the network between the programs and the servers.
type network struct {
	wanted  time.Duration // how much longer a round trip is to be
	near    time.Duration // the time of a ping of PostgreSQL without the network
	far     time.Duration // and with it
	closers []func()
}

// behind returns the servers of e with so much network before each, for the
// caller to close.
func (e *env) behind(ctx context.Context, wanted time.Duration) (_ *env, err error) {
	n := &network{wanted: wanted}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	far := &env{network: n}
	if far.postgres, err = e.postgres.behind(n); err != nil {
		return nil, err
	}
	if e.redis != nil {
		if far.redis, err = e.redis.behind(n); err != nil {
			return nil, err
		}
	}
	if n.near, err = e.postgres.ping(ctx); err != nil {
		return nil, err
	}
	if n.far, err = far.postgres.ping(ctx); err != nil {
		return nil, err
	}
	return far, nil
}

// before returns the address at which a server is to be had behind the network.
func (n *network) before(server string) (string, error) {
	p, err := startProxy(server, n.wanted)
	if err != nil {
		return "", err
	}
	n.closers = append(n.closers, p.close)
	return p.listener.Addr().String(), nil
}

func (n *network) close() {
	for _, closer := range slices.Backward(n.closers) {
		closer()
	}
}

func (r *redisServer) behind(n *network) (*redisServer, error) {
	address, err := n.before(r.address)
	return &redisServer{address: address, counts: &counts{}}, err
}

// behind returns the server with pools of its own, which end with the network.
func (p *postgresServer) behind(n *network) (*postgresServer, error) {
	config, err := pgxpool.ParseConfig(p.server.URL)
	if err != nil {
		return nil, fmt.Errorf("parsing the URL of the server: %w", err)
	}
	_, server := pgconn.NetworkAddress(config.ConnConfig.Host, config.ConnConfig.Port)
	address, err := n.before(server)
	if err != nil {
		return nil, err
	}
	far := &postgresServer{server: p.server, schema: p.schema, counts: &counts{through: address}}
	n.closers = append(n.closers, far.closePools)
	return far, far.openPools()
}

// ping returns the median time of a round trip to the server.
func (p *postgresServer) ping(ctx context.Context) (time.Duration, error) {
	conn, err := p.few.Acquire(ctx)
	if err != nil {
		return 0, fmt.Errorf("connecting for a ping: %w", err)
	}
	defer conn.Release()
	times := make([]time.Duration, 101)
	for i := range times {
		start := time.Now()
		if err := conn.Ping(ctx); err != nil {
			return 0, fmt.Errorf("pinging the server: %w", err)
		}
		times[i] = time.Since(start)
	}
	return median(times), nil
}
